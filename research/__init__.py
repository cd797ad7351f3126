"""What authors of maps and papers need; no part of the wheel, and no promises. See README.md."""

# Before nulls: with `pip install -e research`, this module imports nulls for its entry points.
import soren_align.spectral.maps  # noqa: F401
