"""The keys that this package adds to metrics.jsonl, their meanings, and their names in a report.

`docs/make_metrics.py` writes the tables of docs/metrics.md from here. A new measurement is a function in
`training/measure/` that returns it and an entry here; with a title, a study reads it at every evaluation of its runs,
and its report can show it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One measurement, under one key of metrics.jsonl or two. `meaning` is Markdown, for docs/metrics.md."""

    key: str
    meaning: str
    further_key: str | None = None
    """The same for the other parameters, or a detail of the measurement."""
    recipe: str | None = None
    """The setting that asks for it, of those that are measured at evaluations; None: measured at every log."""
    title: str | None = None
    """Its name in a study's report, which reads only measurements with one."""
    label: str = ""
    """The title with the unit, for an axis."""
    at_start: float | None = None
    """The value of the starting checkpoint, measured or not; None: known only if it was measured."""


_ALL = (
    Metric("learning_rate", "learning rate of this step", "aux_learning_rate"),
    Metric(
        "update_rms",
        "root mean square of the change of the weights in this step, after weight decay and rounding. For the matrices "
        "with `adjust_lr_fn: match_rms_measured` it is 0.2 x `learning_rate` (before weight decay)",
        "aux_update_rms",
    ),
    Metric(
        "relative_change",
        r"\|\|W - W_0\|\| / \|\|W_0\|\| over all matrices together, where W_0 is the starting checkpoint. A process "
        "with more than 2 million weights compares only evenly spaced rows of each tensor; after training it compares "
        "all rows",
        "aux_relative_change",
        title="displacement",
        label="displacement ||W - W0|| / ||W0||",
        at_start=0.0,
    ),
    Metric(
        "map_max_singular_value",
        "largest and smallest singular value of the map's output. It is the mean over one matrix of each shape, up to "
        "eight shapes per process. The sigmoid maps small singular values to 1/2. If the minimum is far below the "
        "maximum, the iteration did not converge for small singular values, or the gradient does not have full rank",
        "map_min_singular_value",
    ),
    Metric(
        "map_error",
        "relative distance (Frobenius norm) between the map's output and the exact sigmoid's output, for one matrix, "
        "and the number of this matrix in the model's order, from 0. Each log takes the next matrix; which one depends "
        "on the step alone, so resumed runs and several ranks agree. Not measured with the map `exact`, with "
        "`run.log_spectra.map_error: false`, and for a matrix with more than 1024 rows and more than 1024 columns",
        "map_error_matrix",
    ),
    Metric(
        "num_out_of_range",
        "how often, since the process started, a matrix had a singular value above 4. `minimax` then scales the matrix "
        "down to 4.3, the end of its polynomial's range; `sns` clamps the argument of tanh (`soren_align/spectral/`)",
    ),
    Metric(
        "num_skipped_steps",
        "with float16 only: steps since the process started that were skipped, because a gradient was infinite at the "
        "current loss scale. A skipped step halves the scale and changes neither weights nor optimizer state. A scale "
        "below 1 ends the run",
    ),
    Metric(
        "tokens_per_second",
        "tokens (without padding) trained on since the last log, divided by the time since then, evaluations included",
    ),
    Metric(
        "kl_to_start",
        r"KL(start \|\| model) of the next token, in nats: the mean over that many tokens, evenly spaced over the "
        "answers of up to 64 evenly spaced held-out examples. The answers are the tokens in the loss; for a preference "
        "pair, the tokens of the chosen answer",
        recipe="run.kl_to_start: 256",
        title="KL to the start",
        label="KL to the start, nats per token",
        at_start=0.0,
    ),
    Metric(
        "retention_loss",
        "mean loss per token of the answers, in nats, on examples that the model must not forget: up to 64 evenly "
        "spaced examples, up to 256 tokens each. The file has any form that SFT reads, for DPO too. In plain texts all "
        "tokens count",
        recipe="data.retention: {path: ...}",
        title="retention loss",
        label="retention loss, nats per token",
    ),
)
METRICS = {metric.key: metric for metric in _ALL}
IN_STUDIES = tuple(metric for metric in _ALL if metric.title)
"""Those that a study reads at every evaluation of its runs."""
