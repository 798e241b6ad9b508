"""The plan of a run that keeps within its memory: as little is computed again as that asks for."""

from dataclasses import dataclass, replace

from krnl.backends.base import Backend, Paper
from krnl.dtypes import DType
from krnl.errors import PlanError
from krnl.formats.peft import AdapterConfig
from krnl.models.config import ModelConfig
from krnl.models.training_programs import Recomputed
from krnl.models.weights import Weights
from krnl.plan.arena import ALIGNMENT
from krnl.training.config import Recompute
from krnl.training.memory import MemoryUse, gib, memory_use
from krnl.training.session import TrainingPlan, plan_programs, plan_training

LIMIT = "--memory-limit"  # the source of a budget that was asked for


@dataclass(frozen=True)
class Budget:
    """Bytes that a run may take, and what sets them, for people."""

    nbytes: int
    source: str


def memory_budget(backend: Backend | Paper, memory_limit: float | None) -> Budget:
    """What the device has, or `memory_limit` GiB where those are less."""
    device = Budget(backend.limits.memory, f"{backend.name} may use on this machine")
    if memory_limit is None or memory_limit * 2**30 >= device.nbytes:
        return device
    return Budget(int(memory_limit * 2**30), LIMIT)


@dataclass(frozen=True)
class BudgetedPlan:
    """A training plan, the memory that it takes, and that which it may take."""

    training: TrainingPlan
    use: MemoryUse
    budget: Budget
    recompute: Recompute  # as it was asked for
    auto_fits: bool = False  # where this plan exceeds the budget, another with auto would not

    @property
    def over(self) -> int:
        """Bytes beyond the budget; at most 0 if the run keeps within it."""
        return self.use.total - self.budget.nbytes

    @property
    def recomputed(self) -> str:
        """What the backward pass computes again, and why, for people; empty if it is nothing."""
        programs = self.training.programs
        trained, again = programs.trained, programs.recomputed
        if again == "layer":
            count, what = trained, "everything inside {} is computed again"
        else:
            count, what = min(again, trained), "gate and up of {} are computed again"
        if not count:
            return ""
        layers = f"{count} of {trained} trained decoder {'layer' if trained == 1 else 'layers'}"
        chosen = self.recompute == "auto" and self.over <= 0
        why = f" to stay within {gib(self.budget.nbytes)}" if chosen else ""
        return what.format(layers) + why

    def shortage(self, lower: str = "--tokens") -> str:
        """By how much the run exceeds its budget, and what helps: that `lower` is lowered, unless
        what is no activation exceeds it already. Empty if the run does not."""
        if self.over <= 0:
            return ""
        use, budget = self.use, self.budget
        activations = use.saved + use.temporaries
        said = (
            f"This run needs {gib(use.total)}, which is {gib(self.over)} more than "
            f"{budget.source} ({gib(budget.nbytes)}). "
        )
        # Where the picture at the end takes more than training, activations do not count.
        others = use.total if use.drawing else use.total - activations
        if others > budget.nbytes:
            advice = "raise the limit, or " if budget.source == LIMIT else ""
            return (
                f"{said}Weights, adapter and the rest alone take {gib(others)}, whatever the "
                f"activations: {advice}choose a smaller model or rank."
            )
        advice = f"lower {lower}"
        if self.auto_fits:
            advice += ", or leave --recompute at auto"
        return f"{said}{gib(activations)} of it are activations: {advice}."

    def check(self, lower: str = "--tokens") -> None:
        """PlanError that tells the shortage, if there is one."""
        if shortage := self.shortage(lower):
            raise PlanError(shortage)


def plan_within(
    memory_limit: float | None,
    recompute: Recompute,
    config: ModelConfig,
    weights: Weights,
    adapter: AdapterConfig,
    paths: tuple[str, ...],
    backend: Backend | Paper,
    activation: DType,
    tokens: int,
) -> BudgetedPlan:
    """As `plan_training`, within what the device has, or `memory_limit` GiB where those are less.
    `recompute` auto: gate and up of the fewest layers that bring the run within this budget are
    computed again, or, where those of all are not enough, whole layers. What is returned may exceed
    the budget all the same."""
    fixed: dict[Recompute, Recomputed] = {"none": 0, "mlp": config.layers, "layer": "layer"}
    training = plan_training(
        config, weights, adapter, paths, backend, activation, tokens, fixed.get(recompute, 0)
    )
    budget = memory_budget(backend, memory_limit)
    planned = BudgetedPlan(training, memory_use(training, backend), budget, recompute)
    if planned.over <= 0 or recompute == "layer":
        return planned
    if recompute == "auto":
        return _recomputing_least(planned, backend)
    return replace(planned, auto_fits=_recomputing(planned, "layer", backend).over <= 0)


def _recomputing(
    planned: BudgetedPlan, recomputed: Recomputed, backend: Backend | Paper
) -> BudgetedPlan:
    """The same run with another choice."""
    training = plan_programs(planned.training.programs.recomputing(recomputed), backend)
    # What the process holds is no matter of this choice, and the plans tried add to it.
    use = replace(memory_use(training, backend), process=planned.use.process)
    return replace(planned, training=training, use=use)


def _recomputing_least(keeping: BudgetedPlan, backend: Backend | Paper) -> BudgetedPlan:
    """In place of a plan that keeps everything and exceeds its budget."""
    programs = keeping.training.programs

    def again(recomputed: Recomputed) -> BudgetedPlan:
        return _recomputing(keeping, recomputed, backend)

    # A layer that computes its own again saves no more than this, so none is passed over.
    width, size = programs.decoder.config.intermediate_size, programs.decoder.activation.size
    gate_and_up = 2 * -(-programs.capacity * width * size // ALIGNMENT) * ALIGNMENT
    planned, layers, too_few = keeping, 0, 0
    while planned.over > 0 and layers < programs.trained:
        too_few = layers
        layers = min(layers + -(-planned.over // gate_and_up), programs.trained)
        planned = again(layers)
    if planned.over > 0:
        return again("layer")
    # But for how buffers happen to fit together: one layer fewer may do.
    while layers - 1 > too_few:
        fewer = again(layers - 1)
        if fewer.over > 0:
            break
        planned, layers = fewer, layers - 1
    return planned
