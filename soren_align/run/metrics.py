"""The keys that this package adds to metrics.jsonl, their meanings, and their names in a report.

`docs/make_metrics.py` writes the tables of docs/metrics.md from here. A new measurement is a
function in `training/measure/` that returns it and an entry here; with a title, a study reads it at
every evaluation of its runs, and its report can show it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One measurement, under one key of metrics.jsonl or two.
    `meaning` is Markdown, for docs/metrics.md.
    """

    key: str
    meaning: str
    further_key: str | None = None
    """The same for the other parameters, or a detail of the measurement."""
    recipe: str | None = None
    """The setting that asks for it, of those that are measured at evaluations; None: measured at
    every log."""
    title: str | None = None
    """The name in a study's report, which reads only measurements with one."""
    label: str = ""
    """The title with the unit, for an axis."""
    at_start: float | None = None
    """The value of the starting checkpoint, measured or not; None: known only if it was
    measured."""


# In the order of docs/metrics.md, which is made of these records; tests/test_docs.py finds a record
# whose key no measurement has.
_ALL = (
    Metric("learning_rate", "learning rate of this step", "aux_learning_rate"),
    Metric(
        "update_rms",
        "root mean square of the change of the weights in this step, after weight decay and "
        "rounding. With `adjust_lr_fn: match_rms_measured`, the root mean square of the "
        "matrices' updates is 0.2 x `learning_rate` (or `match_rms` x `learning_rate`) before "
        "weight decay",
        "aux_update_rms",
    ),
    Metric(
        "relative_change",
        "\\|\\|W - W_0\\|\\| / \\|\\|W_0\\|\\| over all matrices together, where W_0 is the "
        "starting checkpoint. During training, a process with more than 2 million weights "
        "measures this change only on evenly spaced rows of each tensor, to save time. At the "
        "end of training, it measures the change on all rows",
        "aux_relative_change",
        title="displacement",
        label="displacement ||W - W0|| / ||W0||",
        at_start=0.0,
    ),
    Metric(
        "map_max_singular_value",
        "largest and smallest singular value of the map's output (the update before it is "
        "scaled). Each of the two values is a mean over the first matrix of each shape, for at "
        "most eight shapes. The sigmoid maps small singular values to 1/2. If the smallest value "
        "is far below the largest, there are two possible reasons: the map's iteration did not "
        "converge for small singular values, or the gradient does not have full rank",
        "map_min_singular_value",
    ),
    Metric(
        "map_contrast",
        "the largest singular value of the map's output, divided by the median one. It is 1 if "
        "the output does not depend on the sizes of the input's singular values. The mean over "
        "the matrices that `map_max_singular_value` measures, without those with more than 1024 "
        "rows and more than 1024 columns",
    ),
    Metric(
        "map_cosine_to_muon",
        "cosines of the angles between the map's output and Muon's exact update (all singular"
        " values 1), and between the output and the momentum; means over the matrices that"
        " `map_contrast` measures. With the sigmoid, the cosine to Muon's update is at least 0.943"
        " ([proof](../research/studies/theorems.md#how-far-the-sigmoid-can-be-from-muon)). With"
        " momentum SGD, the cosine to the momentum is 1",
        "map_cosine_to_momentum",
    ),
    Metric(
        "map_error",
        "norm of the difference between the map's output and the exact sigmoid's output for one "
        "matrix, divided by the norm of the latter (Frobenius norms), and the number of this "
        "matrix. The model's matrices are numbered from 0, and each log measures the next "
        "matrix. The number of the matrix depends only on the step, so it is the same in resumed "
        "runs and on all ranks. This error is not measured for the map `exact`, with "
        "`run.log_spectra.map_error: false`, or for a matrix with more than 1024 rows and more "
        "than 1024 columns",
        "map_error_matrix",
    ),
    Metric(
        "num_out_of_range",
        "how often a matrix has had a singular value above 4.6 (`sns`: 4), counted from the start "
        "of the process. If this happens, `minimax` scales the tanh part of the matrix down, so "
        "that its largest singular value is at most 4.6, the end of its polynomial's range. `sns` "
        "clamps such singular values (`soren_align/spectral/`)",
    ),
    Metric(
        "num_skipped_steps",
        "only with float16: the number of skipped steps, counted from the start of the process. "
        "A step is skipped if a gradient is infinite at the current loss scale. A skipped step "
        "halves the loss scale and changes neither weights nor optimizer state. A loss scale "
        "below 1 ends the run",
    ),
    Metric(
        "tokens_per_second",
        "number of trained tokens (without padding) between the last log and this log, divided "
        "by the time between the two logs, which includes evaluations",
    ),
    Metric(
        "padding",
        "share of the tokens of the batches since the last log that only fill shorter examples to "
        "the longest of their batch. `trainer.train_sampling_strategy: group_by_length` makes it "
        "small",
    ),
    Metric(
        "eval_thumbs_accuracy",
        "only with KTO: of all pairs of a held-out answer labelled good and one labelled bad, the "
        "share in which the model gives the good one the higher mean log-probability of a token "
        "(Mann-Whitney's AUC; an equal pair counts as half). By chance it is 0.5",
    ),
    Metric(
        "kl_to_start",
        r"KL divergence KL(start \|\| model) of the distributions of the next token, in nats. It is"
        r" the mean over 256 "
        "answer tokens (the value of the key), which are evenly spaced over up to 64 held-out "
        "examples. The answer tokens are the tokens in the loss; in a preference pair, those of "
        "the chosen answer",
        recipe="run.kl_to_start: 256",
        title="KL to the start",
        label="KL to the start, nats per token",
        at_start=0.0,
    ),
    Metric(
        "retention_loss",
        "mean loss per answer token, in nats, on examples of abilities that the model should not "
        "forget. Up to 64 evenly spaced examples of the file are used, and up to 256 tokens of "
        "each example. The file has one of the formats that SFT reads, also if the run is DPO. If "
        "the examples are plain texts, all their tokens are answer tokens",
        recipe="data.retention: {path: ...}",
        title="retention loss",
        label="retention loss, nats per token",
    ),
)
METRICS = {metric.key: metric for metric in _ALL}
IN_STUDIES = tuple(metric for metric in _ALL if metric.title)
"""The metrics that a study reads at every evaluation of its runs."""
