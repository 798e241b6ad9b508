"""Training updates with transformers and PEFT. In any environment that has torch, transformers and
peft, on a checkpoint folder:

    python bench/peft_model.py --model FOLDER --steps 10 --adapters fp32

PEFT's own default is fp32 adapters in a 16-bit base; 16 is what a patient user would set."""

import torch
import torch_worker
import training
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch_worker import DEVICES, PRECISIONS

parser = training.arguments(__doc__.splitlines()[0], tuple(PRECISIONS), DEVICES)
parser.add_argument(
    "--variant",
    choices=("eager", "compile", "graph", "checkpointing", "liger"),
    default="eager",
    help="compile: torch.compile (slow to start); graph: compiled, and replayed as CUDA graphs; "
    "checkpointing: activations are computed again; liger: the kernels of liger_kernel, on a GPU",
)
options = parser.parse_args()
torch_worker.prepare(options)
if options.variant == "liger":
    from liger_kernel.transformers import AutoLigerKernelForCausalLM as Loader
else:
    from transformers import AutoModelForCausalLM as Loader
device = options.device
base = Loader.from_pretrained(
    options.model, dtype=PRECISIONS[options.precision], attn_implementation="sdpa"
)
base.config.use_cache = False
config = LoraConfig(
    r=training.RANK,
    lora_alpha=training.ALPHA,
    target_modules="all-linear",
    task_type="CAUSAL_LM",
    lora_dropout=0.0,
)
model = get_peft_model(base, config, autocast_adapter_dtype=options.adapters == "fp32")
with torch.no_grad():
    for name, layer in base.named_modules():
        if isinstance(layer, Linear):
            values = training.adapter(name, layer.out_features, layer.in_features)
            for side, drawn in zip((layer.lora_A, layer.lora_B), values, strict=True):
                side["default"].weight.copy_(torch.from_numpy(drawn))
if options.variant == "checkpointing":
    model.gradient_checkpointing_enable({"use_reentrant": False})
model.to(device).train()
parameters = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(
    parameters,
    training.RATE,
    training.BETAS,
    training.EPS,
    weight_decay=training.WEIGHT_DECAY,
    fused=True,
)
rows = training.batch(base.config.vocab_size, options.rows, options.length, options.chat)
longest = max(len(ids) for ids, _ in rows)
ids = torch.zeros(len(rows), longest, dtype=torch.long)
labels = torch.full((len(rows), longest), -100)
mask = torch.zeros(len(rows), longest, dtype=torch.long)
for i, (row, wanted) in enumerate(rows):
    ids[i, : len(row)] = torch.from_numpy(row)
    labels[i, : len(row)] = torch.from_numpy(wanted)
    mask[i, : len(row)] = 1
given = {"input_ids": ids.to(device), "labels": labels.to(device)}
if options.chat:
    given["attention_mask"] = mask.to(device)
MODES = {"compile": "default", "graph": "reduce-overhead"}  # of torch.compile
mode = MODES.get(options.variant)
forward = torch.compile(model, mode=mode) if mode else model


def step() -> dict[str, float]:
    torch.compiler.cudagraph_mark_step_begin()  # what the last step returned is read by now
    loss = forward(**given).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, training.CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": float(loss.detach()), "norm": float(norm)}


packages = ["transformers", "peft"] + ["liger_kernel"] * (options.variant == "liger")
torch_worker.serve(options, step, packages=packages)
