"""Programs that read on with a cache: keys and values of earlier tokens are kept, not computed
again."""

from dataclasses import dataclass

from krnl.dtypes import F32
from krnl.models.attention import Cache, Context
from krnl.models.decoder import Decoder
from krnl.models.inputs import side_by_side, start_names
from krnl.ops.norm import rms_norm
from krnl.ops.pointwise import embedding, gather_rows, rope_table
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.step import Step


@dataclass(frozen=True)
class ReadInputs:
    """What the host writes before up to n tokens are read, of any mix of sequences."""

    whole: Buffer  # of which all are parts
    live: Buffer
    tokens: Buffer
    position: Buffer
    row: Buffer  # where in the cache each token's key and value go
    start: dict[int | None, Buffer]  # the first cache row a token sees, by window
    stop: Buffer
    pick: Buffer  # the tokens whose logits are wanted
    live_picks: Buffer


class GenerationPrograms:
    """Emits programs that read tokens into a cache of `rows` rows, which they share."""

    def __init__(self, decoder: Decoder, rows: int):
        self.decoder = decoder
        c = decoder.config
        shape = (rows, c.kv_heads, c.head_dim)
        self.cache = [
            tuple(
                Buffer(f"cache{i}.{name}", shape, decoder.activation, Kind.STATE) for name in "kv"
            )
            for i in range(c.layers)
        ]

    def read(self, name: str, tokens: int, picks: int) -> tuple[Step, ReadInputs, Buffer]:
        """A program that reads up to `tokens` tokens and gives the logits of up to `picks` of them,
        float32 [picks, vocabulary]."""
        d = self.decoder
        i = _inputs(name, tokens, picks, set(d.config.windows))
        step = Step(name, d.activation, i.live)
        with step.unsaved():
            x = step(embedding, i.tokens, d.embedding)
            cos, sin = step(rope_table, i.position, d.inv_freq, scale=d.rope_scale)
            for index, layer in enumerate(d.layers):
                k, v = self.cache[index]
                at = Context(cos, sin, i.start[layer.window], i.stop, None)
                with step.scope(f"layer{index}"):
                    x, _ = layer.forward(step, x, at, Cache(k, v, i.row))
            with step.scope("head"):
                picked = step(gather_rows, x, i.pick, live=i.live_picks)
                h, _ = step(rms_norm, picked, d.norm, live=i.live_picks, eps=d.config.rms_norm_eps)
                logits = Buffer(f"{name}.logits", (picks, d.config.vocab_size), F32, Kind.STATE)
                d.head.forward(step, h, None, live=i.live_picks, into=logits)
        return step, i, logits


def _inputs(name: str, tokens: int, picks: int, windows: set[int | None]) -> ReadInputs:
    starts = start_names(windows)
    by_token = ["tokens", "position", "row", *starts.values(), "stop"]
    sizes = {"live": 1, "live_picks": 1, **dict.fromkeys(by_token, tokens), "pick": picks}
    parts = side_by_side(f"{name}.inputs", sizes)
    return ReadInputs(
        whole=parts["live"].root,
        live=parts["live"],
        tokens=parts["tokens"],
        position=parts["position"],
        row=parts["row"],
        start={window: parts[start] for window, start in starts.items()},
        stop=parts["stop"],
        pick=parts["pick"],
        live_picks=parts["live_picks"],
    )
