"""What `krnl profile` calls the dispatches of a pass, and where it says that they stand."""

from pathlib import Path

import pytest

from krnl.formats.peft import AdapterConfig
from krnl.profile_names import names, place
from tiny import ALL, plan_model, write_model

# A whole pass of the plainest family, adapters everywhere; layers that are alike once.
LLAMA = """
fwd x = embedding(tokens)
fwd cos, sin = rope_table(position)
fwd h = rms_norm(x)
fwd u of q, k, v = h@Aᵀ
fwd q, k, v = h@Wᵀ + u@Bᵀ
fwd q = rope(q)
fwd k = rope(k)
fwd att = attention(q, k, v)
fwd u of o = att@Aᵀ
fwd o = att@Wᵀ + u@Bᵀ + x
fwd u of gate, up = h@Aᵀ
fwd gate, up = h@Wᵀ + u@Bᵀ; s = silu(gate)∘up
fwd u of down = s@Aᵀ
fwd down = s@Wᵀ + u@Bᵀ + x
fwd x = gather_rows(x)
fwd logits = h@Wᵀ
fwd loss, dlogits = cross_entropy(logits)
bwd dh = dlogits@W
bwd dx = rms_norm_backward(dh, x)
bwd dx = gather_rows(dx)
bwd h = rms_norm(x)
bwd v of down = dx@B
bwd dB of down += dxᵀ@u
bwd ds = dx@W + v@A; dgate, dup = swiglu'(ds)
bwd dA of down += vᵀ@s
bwd v of gate, up = dgate@B, dup@B
bwd dB of gate, up += dgateᵀ@u, dupᵀ@u
bwd dh = dgate@W + dup@W + v@A
bwd dA of gate, up += vᵀ@h
bwd dx = rms_norm_backward(dh, x, dx)
bwd v of o = dx@B
bwd dB of o += dxᵀ@u
bwd datt = dx@W + v@A
bwd dA of o += vᵀ@att
bwd dq, dk, dv = attention_backward(datt, q, k, v, att)
bwd dq = rope(dq)
bwd dk = rope(dk)
bwd v of q, k, v = dq@B, dk@B, dv@B
bwd dB of q, k, v += dqᵀ@u, dkᵀ@u, dvᵀ@u
bwd dh = dq@W + dk@W + dv@W + v@A
bwd dA of q, k, v += vᵀ@h
"""


def labels(tmp_path: Path, kind: str, adapter: AdapterConfig, **options: object) -> list[str]:
    planned = plan_model(write_model(tmp_path / kind, kind), adapter, **options)
    return names([dispatch.call for dispatch in planned.accumulate.dispatches])


def test_dispatches_are_called_by_what_they_compute(tmp_path):
    assert list(dict.fromkeys(labels(tmp_path, "llama", ALL))) == LLAMA.strip().splitlines()


def test_names_tell_which_members_carry_an_adapter(tmp_path):
    adapter = AdapterConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj"))
    found = labels(tmp_path, "qwen2", adapter)
    for name in (
        "fwd u of q, v = h@Aᵀ",
        "fwd q, k, v = h@Wᵀ + u@Bᵀ + bias",
        "fwd o = att@Wᵀ + x",
        "fwd gate, up = h@Wᵀ; s = silu(gate)∘up",
        "bwd dB of q, v += dqᵀ@u, dvᵀ@u",
        "bwd v of q, v = dq@B, dv@B",
        "bwd ds = dx@W; dgate, dup = swiglu'(ds)",
    ):
        assert name in found


@pytest.mark.parametrize("kind", ["llama", "untied"])
def test_an_adapter_on_the_head_is_called_after_it(tmp_path, kind):
    adapter = AdapterConfig(rank=3, alpha=6.0, targets=("lm_head",))
    found = labels(tmp_path, kind, adapter)
    for name in ("fwd u of logits = h@Aᵀ", "fwd logits = h@Wᵀ + u@Bᵀ"):
        assert name in found
    for name in ("bwd dB of logits += dlogitsᵀ@u", "bwd dA of logits += vᵀ@h"):
        assert name in found


def test_names_with_dropout_norms_of_heads_and_layers_made_again(tmp_path):
    adapter = AdapterConfig(rank=2, alpha=4.0, dropout=0.1)
    found = labels(tmp_path, "qwen3", adapter, recompute="layer")
    for name in (
        "fwd q = head_norm(q)",
        "fwd s = dropout(s)",
        "bwd gate, up = h@Wᵀ + u@Bᵀ; s = silu(gate)∘up",
        "bwd ds = dx@W",
        "bwd ds of down = v@A",
        "bwd ds = dropout_backward(ds)",
        "bwd dgate, dup, s = swiglu_backward(ds, gate, up)",
        "bwd dk = head_norm_backward(dk, k)",
    ):
        assert name in found


def test_places_in_a_model(tmp_path):
    calls = [d.call for d in plan_model(write_model(tmp_path / "m")).accumulate.dispatches]
    found = list(dict.fromkeys(map(place, calls)))
    assert found == ["embedding", "layer 0", "layer 1", "head"]
