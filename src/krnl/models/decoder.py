"""The decoder: embedding, layers, final norm and head, built from a config. Families differ by its
fields alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from krnl.dtypes import DType
from krnl.models.attention import Attention, AttentionSaved, Cache, Context
from krnl.models.config import ModelConfig, rope_frequencies
from krnl.models.lora import AdapterShape, GroupShape, Linear, LoraGroup, Trainable
from krnl.models.mlp import Mlp, MlpSaved
from krnl.models.weights import Weights
from krnl.plan.buffer import Buffer
from krnl.plan.step import Step


@dataclass(frozen=True)
class LayerSaved:
    """What the backward pass of a layer needs."""

    attention: AttentionSaved
    mlp: MlpSaved


class Layer:
    """Attention, then the feed-forward block."""

    def __init__(self, attention: Attention, mlp: Mlp, window: int | None):
        self.attention = attention
        self.mlp = mlp
        self.window = window

    @property
    def adapted(self) -> bool:
        """Whether any adapter sits in this layer."""
        return any(
            g.rank for g in (self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down)
        )

    def forward(
        self,
        step: Step,
        x: Buffer,
        at: Context,
        cache: Cache | None = None,
        recompute_mlp: bool = False,
    ) -> tuple[Buffer, LayerSaved]:
        with step.scope("attention"):
            x, attention = self.attention.forward(step, x, at, cache)
        with step.scope("mlp"):
            x, mlp = self.mlp.forward(step, x, at.noise, recompute_mlp)
        return x, LayerSaved(attention, mlp)

    def backward(
        self, step: Step, dy: Buffer, saved: LayerSaved, at: Context, wanted: bool
    ) -> Buffer | None:
        """The gradient at the layer's input, or None when nothing below is trained (not
        `wanted`)."""
        with step.scope("mlp"):
            dy = self.mlp.backward(step, dy, saved.mlp, at.noise)
        with step.scope("attention"):
            return self.attention.backward(step, dy, saved.attention, at, wanted)


class Decoder:
    """A causal language model of the Llama family with adapters on some of its linear layers.
    `adapters` maps paths of linear layers to the adapters they carry."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        adapters: Mapping[str, AdapterShape],
        activation: DType,
    ):
        self.config = config
        self.weights = weights
        self.activation = activation
        shapes = group_shapes(config)
        self.trainable = Trainable(list(shapes.values()), adapters, activation)
        groups = {
            name: LoraGroup(shape, weights, adapters, self.trainable, stream)
            for stream, (name, shape) in enumerate(shapes.items())
        }
        self.embedding = weights.matrix(
            "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        )
        self.layers = [self._layer(i, groups) for i in range(config.layers)]
        self.norm = weights.vector("model.norm.weight", config.hidden_size)
        self.head = groups["lm_head"]
        inv_freq, self.rope_scale = rope_frequencies(config)
        self.inv_freq = weights.constant("inv_freq", inv_freq)

    def _layer(self, index: int, groups: Mapping[str, LoraGroup]) -> Layer:
        c, path = self.config, f"model.layers.{index}"
        head_norms: tuple[Buffer, Buffer] | tuple[None, None] = (None, None)
        if c.qk_norm:
            head_norms = (
                self.weights.vector(f"{path}.self_attn.q_norm.weight", c.head_dim),
                self.weights.vector(f"{path}.self_attn.k_norm.weight", c.head_dim),
            )
        attention = Attention(
            c,
            self.weights.vector(f"{path}.input_layernorm.weight", c.hidden_size),
            groups[f"{path}.qkv"],
            groups[f"{path}.o"],
            head_norms,
            c.rotary[index],
        )
        mlp = Mlp(
            self.weights.vector(f"{path}.post_attention_layernorm.weight", c.hidden_size),
            groups[f"{path}.gate_up"],
            groups[f"{path}.down"],
            c.rms_norm_eps,
        )
        return Layer(attention, mlp, c.windows[index])


def group_shapes(config: ModelConfig) -> dict[str, GroupShape]:
    """All linear layers, grouped by the input they share, in the order of the forward pass."""
    c = config
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    groups: dict[str, GroupShape] = {}
    for i in range(c.layers):
        path = f"model.layers.{i}"
        attention, mlp = f"{path}.self_attn", f"{path}.mlp"
        groups[f"{path}.qkv"] = GroupShape(
            c.hidden_size,
            (
                Linear(f"{attention}.q_proj", queries, c.qkv_bias),
                Linear(f"{attention}.k_proj", keys, c.qkv_bias),
                Linear(f"{attention}.v_proj", keys, c.qkv_bias),
            ),
        )
        groups[f"{path}.o"] = GroupShape(
            queries, (Linear(f"{attention}.o_proj", c.hidden_size, c.o_bias),)
        )
        groups[f"{path}.gate_up"] = GroupShape(
            c.hidden_size,
            (
                Linear(f"{mlp}.gate_proj", c.intermediate_size),
                Linear(f"{mlp}.up_proj", c.intermediate_size),
            ),
        )
        groups[f"{path}.down"] = GroupShape(
            c.intermediate_size, (Linear(f"{mlp}.down_proj", c.hidden_size),)
        )
    tied = "model.embed_tokens.weight" if c.tie_word_embeddings else ""
    groups["lm_head"] = GroupShape(c.hidden_size, (Linear("lm_head", c.vocab_size, weight=tied),))
    return groups
