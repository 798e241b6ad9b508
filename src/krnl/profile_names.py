"""What the dispatches of a training pass are called: a formula each, such as

    fwd gate, up = h@Wᵀ + u@Bᵀ; s = silu(gate)∘up
    bwd dA of gate, up += vᵀ@h

Symbols follow the buffers from call to call: x is the residual stream, h what a norm makes of it,
att the output of attention, s that of SwiGLU, u and v what stands between A and B; d marks a
gradient. Projections are called as their weights are."""

import re
from collections.abc import Callable, Iterable, Sequence

from krnl.plan.buffer import Buffer, Kind
from krnl.plan.step import Argument, Call, members

_LAYER = re.compile(r"layer\d+")
# The outputs of ops that are no products. `=` stands for the symbol of the first input, - for what
# no formula mentions.
_OUTPUTS = {
    "embedding": ("x",),
    "rope_table": ("cos", "sin"),
    "rms_norm": ("h", "-"),
    "rms_norm_backward": ("dx",),
    "head_norm": ("=", "-"),
    "head_norm_backward": ("=",),
    "rope": ("=",),
    "attention": ("att", "-"),
    "attention_backward": ("dq", "dk", "dv"),
    "swiglu": ("s",),
    "swiglu_backward": ("dgate", "dup", "s"),
    "gather_rows": ("=",),
    "cross_entropy": ("loss", "dlogits"),
    "dropout": ("=",),
    "dropout_backward": ("=",),
}

_UNSAID = ("-", "cos", "sin")  # among inputs


def names(calls: Sequence[Call]) -> list[str]:
    """A name for each call of a program, `fwd …` or `bwd …`. Calls that differ only in their layer
    or chunk share one."""
    namer = _Namer(calls)
    return [f"{direction(call)} {namer.formula(call)}" for call in calls]


def direction(call: Call) -> str:
    """`bwd` for what belongs to the backward pass, else `fwd`."""
    scope, *_ = call.label.split("/")
    if scope in ("forward", "backward"):
        return "fwd" if scope == "forward" else "bwd"
    # The head, and what stands outside of everything. Its last gather goes by the inverse index.
    inverse = any(buffer.name == "slot" for buffer in call.reads())
    return "bwd" if inverse or call.op.name.endswith(("_backward", "_grad")) else "fwd"


def place(call: Call) -> str:
    """Where in the model a call stands: `layer 3`, `head` or `embedding`."""
    for scope in call.label.split("/")[:-1]:
        if _LAYER.fullmatch(scope):
            return f"layer {scope[len('layer') :]}"
        if scope == "head":
            return "head"
    return "embedding"


class _Namer:
    """Goes through the calls in their order and remembers what each buffer is called."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._symbols: dict[Buffer, str] = {}  # by the buffer that owns the memory
        self._adapted: dict[str, str] = {}  # group, by its first path -> members with an adapter
        self._inputs: dict[str, str] = {}  # group -> the symbol of its input
        self._rules: dict[str, Callable[[dict[str, Argument]], str]] = {
            "lora_down": self._down,
            "lora_linear": self._linear,
            "lora_swiglu": self._swiglu,
            "lora_up_backward": self._up_backward,
            "lora_b_grad": self._b_grad,
            "lora_a_grad": self._a_grad,
            "lora_linear_backward": self._linear_backward,
            "lora_swiglu_backward": self._swiglu_backward,
        }
        for call in calls:
            if call.op.name in ("lora_linear", "lora_swiglu"):
                arguments = call.arguments
                matrices = _group(arguments, "b", "b_gate", "b_up")
                first = _path(_group(arguments, "w", "w_gate", "w_up")[0])
                self._adapted[first] = ", ".join(_member(b) for b in matrices if b.size)

    def formula(self, call: Call) -> str:
        rule = self._rules.get(call.op.name)
        return rule(call.arguments) if rule else self._plain(call)

    def _plain(self, call: Call) -> str:
        """outputs = op(inputs): the temps, or what else is read first where there are none."""
        given = [self._symbol(b) for b in call.reads() if b.kind is Kind.TEMP]
        given = [symbol for symbol in given if symbol not in _UNSAID]
        given = given or [self._symbol(b) for b in call.reads()][:1]
        outputs = _OUTPUTS.get(call.op.name) or tuple(p.name for p in call.op.outputs)
        made = [given[0] if given and name == "=" else name for name in outputs]
        for argument, name in zip(call.outputs, made, strict=True):
            self._call(argument, name)
        shown = ", ".join(name for name in made if name != "-")
        return f"{shown} = {call.op.name}({', '.join(dict.fromkeys(given))})"

    def _down(self, a: dict[str, Argument]) -> str:
        self._call(a["u"], "u")
        return f"u of {self._whose(a['a'])} = {self._one(a['x'])}@Aᵀ"

    def _linear(self, a: dict[str, Argument]) -> str:
        weights, residual = members(a["w"]), a["residual"]
        made = [_member(weight) for weight in weights]
        for buffer, name in zip(members(a["y"]), made, strict=True):
            self._call(buffer, name if residual is None else self._one(residual))
        more = [" + bias"] if a["bias"] is not None else []
        more += [f" + {self._one(residual)}"] if residual is not None else []
        return f"{', '.join(made)} = {self._wide(a, weights[0])}{''.join(more)}"

    def _swiglu(self, a: dict[str, Argument]) -> str:
        for name, symbol in (("gate", "gate"), ("up", "up"), ("act", "s")):
            self._call(a[name], symbol)
        return f"gate, up = {self._wide(a, members(a['w_gate'])[0])}; s = silu(gate)∘up"

    def _wide(self, a: dict[str, Argument], weight: Buffer) -> str:
        x = self._inputs[_path(weight)] = self._one(a["x"])
        return f"{x}@Wᵀ" + (" + u@Bᵀ" if a["u"] is not None else "")

    def _up_backward(self, a: dict[str, Argument]) -> str:
        self._call(a["v"], "v")
        pairs = list(self._adapted_pairs(a["dy"], a["b"]))
        return f"v of {_listed(m for _, m in pairs)} = {_listed(f'{dy}@B' for dy, _ in pairs)}"

    def _b_grad(self, a: dict[str, Argument]) -> str:
        pairs = list(self._adapted_pairs(a["dy"], a["db"]))
        return f"dB of {_listed(m for _, m in pairs)} += {_listed(f'{dy}ᵀ@u' for dy, _ in pairs)}"

    def _a_grad(self, a: dict[str, Argument]) -> str:
        return f"dA of {self._whose(a['da'])} += vᵀ@{self._one(a['x'])}"

    def _linear_backward(self, a: dict[str, Argument]) -> str:
        weights = members(a["w"])
        made = f"d{self._inputs.get(_path(weights[0]), 'x')}"
        self._call(a["dx"], made)
        if weights[0].name.endswith(".A"):  # the adapters' share alone, before their dropout
            return f"{made} of {self._whose(a['w'])} = v@A"
        terms = [f"{self._symbol(dy)}@W" for dy in members(a["dy"])]
        return f"{made} = {' + '.join(terms + ['v@A'] * (a['v'] is not None))}"

    def _swiglu_backward(self, a: dict[str, Argument]) -> str:
        for name, symbol in (("dgate", "dgate"), ("dup", "dup"), ("act", "s")):
            self._call(a[name], symbol)
        product = f"{self._one(a['dy'])}@W" + (" + v@A" if a["v"] is not None else "")
        return f"ds = {product}; dgate, dup = swiglu'(ds)"

    def _adapted_pairs(self, dy: Argument, matrices: Argument) -> Iterable[tuple[str, str]]:
        """Each adapted member's gradient and name."""
        for gradient, matrix in zip(members(dy), members(matrices), strict=True):
            if matrix.size:
                yield self._symbol(gradient), _member(matrix)

    def _whose(self, stacked: Argument) -> str:
        """The members whose A lie in this buffer, which is called after the first of them."""
        (buffer,) = members(stacked)
        return self._adapted.get(_path(buffer)) or _member(buffer)

    def _one(self, argument: Argument) -> str:
        (buffer,) = members(argument)
        return self._symbol(buffer)

    def _symbol(self, buffer: Buffer) -> str:
        return self._symbols.get(buffer.root, buffer.name.rpartition(".")[2])

    def _call(self, argument: Argument, symbol: str) -> None:
        for buffer in members(argument):
            self._symbols[buffer.root] = symbol


def _group(arguments: dict[str, Argument], *parameters: str) -> list[Buffer]:
    return [buffer for name in parameters for buffer in members(arguments.get(name))]


def _path(buffer: Buffer) -> str:
    """The linear layer that a matrix belongs to. A head may be tied to the embedding."""
    path = buffer.name.rpartition(".")[0]
    return "lm_head" if path.endswith("embed_tokens") else path


def _member(buffer: Buffer) -> str:
    """A projection's name in formulas: q of …self_attn.q_proj."""
    name = _path(buffer).rpartition(".")[2]
    return "logits" if name == "lm_head" else name.removesuffix("_proj")


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)
