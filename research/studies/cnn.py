"""The paper's errors on the gradients of a CNN, measured anew: the tables of research/studies/cnn.md.

    python -m research.studies.cnn [SEED]        half a minute on one core; SEED is 0

LeNet-5 on drawn images. As in the paper, each validation mini-batch has a gradient,
each layer's gradient G [out, in * kh * kw] is divided by its Frobenius norm, and a map's values are
compared with the sigmoid, by float64 SVD.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from soren_align.core.optimizer_settings import RESOLUTIONS
from soren_align.spectral import minimax_sigmoid, released_sigmoid, soft_newton_schulz
from soren_align.spectral.exact import null_space_bound
from soren_align.spectral.sns import T_LIMIT, T_STEPS, cubic_iteration

MAPS = {
    **{
        f"SNS K = {steps}": partial(soft_newton_schulz, steps=steps)
        for steps in (5, 10, 11, 15, 20)
    },
    "released (K = 5)": released_sigmoid,
    **{
        f"minimax {value:g}": partial(minimax_sigmoid, resolution=value)
        for value in sorted(RESOLUTIONS)[::-1]
    },
}
PAPER = {
    2: (0.0138, 0.0902),
    4: (0.0139, 0.0893),
    6: (0.0155, 0.0924),
    8: (0.0158, 0.0950),
    10: (0.0163, 0.0971),
}
LAYERS = {"0": "conv1", "3": "conv2", "7": "linear1", "9": "linear2", "11": "head"}
SIDE, NOISE, BATCH_SIZE = 32, 0.4, 128
SHAPES: dict[str, Callable] = {  # x and y are -1 to 1 across the shape
    "disc": lambda x, y: np.hypot(x, y) < 1,
    "ring": lambda x, y: abs(np.hypot(x, y) - 0.8) < 0.2,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 1,
    "frame": lambda x, y: abs(np.maximum(abs(x), abs(y)) - 0.8) < 0.2,
    "diamond": lambda x, y: abs(x) + abs(y) < 1,
    "triangle": lambda x, y: (abs(x) < (y + 1) / 2) & (y < 1),
    "plus": lambda x, y: (np.minimum(abs(x), abs(y)) < 0.25) & (np.maximum(abs(x), abs(y)) < 1),
    "cross": lambda x, y: (abs(abs(x) - abs(y)) < 0.3) & (np.maximum(abs(x), abs(y)) < 1),
    "vertical stripes": lambda x, y: (np.sin(6 * x) > 0) & (np.maximum(abs(x), abs(y)) < 1),
    "horizontal stripes": lambda x, y: (np.sin(6 * y) > 0) & (np.maximum(abs(x), abs(y)) < 1),
}


Images = tuple[Tensor, Tensor]


def images(number: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Drawn SHAPES [number, 3, 32, 32] of random place, size, colours and noise, and their classes
    [number].
    """
    labels = rng.integers(len(SHAPES), size=number)
    centre = rng.uniform(10, 22, (2, number, 1, 1))
    radius = rng.uniform(5, 10, (number, 1, 1))
    y, x = (np.mgrid[:SIDE, :SIDE][:, None] - centre) / radius
    mask = np.empty((number, SIDE, SIDE), dtype=bool)
    for label, contains in enumerate(SHAPES.values()):
        mask[labels == label] = contains(x[labels == label], y[labels == label])
    shape, background = rng.uniform(-1, 1, (2, number, 3, 1, 1))
    pixels = np.where(mask[:, None], shape, background) + NOISE * rng.normal(
        size=(number, 3, SIDE, SIDE)
    )
    return torch.tensor(pixels, dtype=torch.float32), torch.tensor(labels)


def network() -> nn.Sequential:
    """LeNet-5 for ten classes, with ReLU and max pooling."""
    layers = [
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    layers += [
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    ]
    return nn.Sequential(*layers)


def gradients(model: nn.Sequential, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The normalised gradients of all mini-batches: [batches, out, in * kh * kw] by layer."""
    weights = [model.get_submodule(index).weight for index in LAYERS]
    batches = zip(pixels.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True)
    by_batch = [
        torch.autograd.grad(nn.functional.cross_entropy(model(x), y), weights) for x, y in batches
    ]
    by_layer = [torch.stack(matrices).flatten(2) for matrices in zip(*by_batch, strict=True)]
    return {
        n: g / torch.linalg.matrix_norm(g, keepdim=True)
        for n, g in zip(LAYERS.values(), by_layer, strict=True)
    }


def drawn(seed: int, num_images: int = 4096, num_validation: int = 1280) -> tuple[Images, Images]:
    """The training images and the validation images of a seed."""
    rng = np.random.default_rng(seed)
    return images(num_images, rng), images(num_validation, rng)


def training(
    seed: int, train: Images, held_out: Images, epochs: Sequence[int]
) -> Iterator[tuple[float, dict]]:
    """Train with AdamW; yield (validation accuracy, `gradients`) after each of `epochs`."""
    torch.manual_seed(seed)
    pixels, labels = train
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(1, epochs[-1] + 1):
        for batch in torch.randperm(len(labels)).split(BATCH_SIZE):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels[batch]), labels[batch]).backward()
            optimizer.step()
        if epoch in epochs:
            is_right = model(held_out[0]).argmax(1) == held_out[1]
            yield is_right.float().mean().item(), gradients(model, *held_out)


def errors(
    matrices: Tensor, spectral_map: Callable[[Tensor], Tensor], with_null_space: bool = False
) -> Tensor:
    """[batches, 3]: MAE, MaxErr, MaxRelErr of a map on matrices [batches, m, n], without their null
    space.

    with_null_space: over all min(m, n) singular values; the sigmoid of 0 is 1/2.
    """
    u, sigma, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    values = ((u.mT @ spectral_map(matrices).double()) * vh).sum(-1)
    counts = (sigma > null_space_bound(matrices) * sigma[:, :1]) | with_null_space
    error = (values - sigma.sigmoid()).abs() * counts
    return torch.stack(
        [error.sum(-1) / counts.sum(-1), error.amax(-1), (error / sigma.sigmoid()).amax(-1)], dim=-1
    )


def spectrum_of(mae: float, max_err: float, steps: int) -> Tensor:
    """[9] singular values of norm 1 with these errors under SNS: one large, seven equal, one
    small.
    """

    def error(sigma: Tensor) -> Tensor:
        q, t = (
            cubic_iteration(x[:, None, None], k)[:, 0, 0]
            for x, k in ((sigma, steps), (sigma / T_LIMIT, T_STEPS))
        )
        return (q + t) / 2 - sigma.sigmoid()

    # up to 0.36: seven of them have norm 0.96
    sigma = torch.logspace(-6, -0.44, 200_001, dtype=torch.float64)
    small = sigma[(error(sigma) > -max_err).nonzero()[0]]
    large = (1 - 7 * sigma**2 - small**2).sqrt()
    sums = error(large).abs() + 7 * error(sigma).abs() + max_err
    index = torch.where(sigma > small, sums - 9 * mae, torch.inf).abs().argmin()
    return torch.cat([large[index, None], sigma[index].expand(7), small])


def print_row(*cells: object, is_head: bool = False) -> None:
    """Print a row of a table; a head is followed by its line."""
    print(f"| {' | '.join(map(str, cells))} |" + ("\n|" + "---|" * len(cells)) * is_head)


def tables(seed: int, train: Images, held_out: Images) -> None:
    """Train, and print the tables."""
    measured = dict(zip(PAPER, training(seed, train, held_out, list(PAPER)), strict=True))
    print_row(
        "head: MAE / MaxErr",
        *(f"epoch {e} ({a:.0%})" for e, (a, _) in measured.items()),
        is_head=True,
    )
    print_row("the paper's", *(f"{mae:.4f} / {max_err:.4f}" for mae, max_err in PAPER.values()))
    for name, spectral_map in MAPS.items():
        of_epochs = [errors(g["head"], spectral_map)[:, :2] for _, g in measured.values()]
        pairs = [zip(x.mean(0).tolist(), x.std(0).tolist(), strict=True) for x in of_epochs]
        print_row(name, *(" / ".join(f"{m:.4f} ± {s:.4f}" for m, s in pair) for pair in pairs))
    last = measured[10][1]
    print("\nepoch 10: MAE / MaxErr / MaxRelErr")
    print_row(
        "map",
        *(f"{name} {'x'.join(map(str, g[0].shape))}" for name, g in last.items()),
        is_head=True,
    )
    for name, spectral_map in MAPS.items():
        of_layers = [errors(g, spectral_map).mean(0).tolist() for g in last.values()]
        print_row(name, *(" / ".join(f"{value:.3g}" for value in row) for row in of_layers))
    null = errors(last["head"], soft_newton_schulz, with_null_space=True).mean(0).tolist()
    print(
        "\nSNS K = 15 on the head with its null space:", " / ".join(f"{x:.3g}" for x in null), "\n"
    )
    print_row("K", "largest", "seven equal", "smallest", "MAE / MaxErr / MaxRelErr", is_head=True)
    for steps in (5, 10, 15, 20):
        spectrum = spectrum_of(*PAPER[2], steps)
        row = errors(spectrum.diag()[None], partial(soft_newton_schulz, steps=steps))[0].tolist()
        print_row(
            steps,
            *(f"{x:.3g}" for x in spectrum[[0, 1, 8]].tolist()),
            " / ".join(f"{x:.4f}" for x in row),
        )


def main() -> None:
    """Print the tables of the command's seed."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    tables(seed, *drawn(seed))


if __name__ == "__main__":
    main()
