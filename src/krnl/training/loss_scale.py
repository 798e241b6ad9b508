"""Dynamic loss scaling: keeps the gradients of fp16 activations within what fp16 can hold.

Gradients are formed of the loss times a scale, and the update divides by it. An update whose
gradients overflowed is skipped, and the run goes on with the next one at half the scale; after many
good ones in a row the scale is doubled (Micikevicius et al. 2018, "Mixed precision training",
section 3.2; factors and interval are those of PyTorch's GradScaler and of TensorFlow).

KRNL's gradients are sums over target tokens until the update makes means of them, so the scale is
per target and does not depend on how many there are. At the logits the gradient is
scale · (softmax - one-hot), at most the scale in size, which gives the constants below.
"""

from dataclasses import dataclass

from krnl.dtypes import F16, DType

# fp16 ends at 65,504: the gradient at the logit of an improbable target, -scale, still fits.
LARGEST = 2.0**15
# Leaves gradients room to grow 64-fold between the logits and the first layer; with a fresh adapter
# the first rows of examples/storyteller fit up to 2^13. PyTorch starts at 2^16, but of the mean
# over targets: for 64 targets that is 2^10 of each. 2^16 of each overflows once a target's
# probability is below 2^-11, as one is in any first update.
START = 2.0**10
# The gradient as it is: if that overflows, the scale is not to blame.
SMALLEST = 1.0
INTERVAL = 2000  # good updates in a row, after which the scale is doubled
# Updates in a row whose loss is no number, after which the model is held to be too large for fp16.
PATIENCE = 10


@dataclass
class LossScale:
    """The scale and what has become of it; goes into every checkpoint. Where `largest` is 1 the
    scale is 1 and stays so."""

    value: float
    largest: float
    good: int = 0  # updates in a row without overflow, at this scale
    skipped: int = 0  # updates in all
    lost: int = 0  # updates in a row without a loss

    @property
    def dynamic(self) -> bool:
        return self.largest > SMALLEST

    def grow(self) -> None:
        """After an update that was applied."""
        self.good += 1
        self.lost = 0
        if self.good >= INTERVAL and self.value < self.largest:
            self.value, self.good = 2.0 * self.value, 0

    def skip(self) -> bool:
        """After an update whose loss is not finite, which no scale can help: fp16 did not hold the
        activations of its rows. Counts it as skipped; False after too many in a row."""
        if not self.dynamic or self.lost >= PATIENCE:
            return False
        self.lost += 1
        self.skipped += 1
        return True

    def shrink(self) -> bool:
        """After an update whose gradients overflowed: counts it as skipped. False, with nothing
        done, if no smaller scale is left to try."""
        if self.value <= SMALLEST:
            return False
        self.value, self.good = self.value / 2.0, 0
        self.skipped += 1
        return True


def initial_scale(activation: DType) -> LossScale:
    """Of a new run. Only fp16 needs one: fp32 and bf16 hold gradients of any size."""
    return LossScale(START, LARGEST) if activation is F16 else LossScale(SMALLEST, SMALLEST)
