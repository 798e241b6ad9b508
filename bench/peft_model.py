"""Training updates with transformers and PEFT. In any environment that has torch, transformers and
peft, on a checkpoint folder:

    python bench/peft_model.py --model FOLDER --steps 10 --adapters fp32

PEFT's own default is fp32 adapters in a 16-bit base; 16 is what a patient user would set."""

import torch
from peers.protocol import model_arguments, serve
from peers.shapes import batch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

parser = model_arguments(__doc__.splitlines()[0])
parser.add_argument("--precision", choices=tuple(PRECISIONS), default="bf16")
parser.add_argument("--adapters", choices=("16", "fp32"), default="fp32")
parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
parser.add_argument("--compile", action="store_true", help="torch.compile (slow to start)")
options = parser.parse_args()
device = "cpu"
if options.device == "gpu":
    device = "cuda" if torch.cuda.is_available() else "mps"
base = AutoModelForCausalLM.from_pretrained(options.model, dtype=PRECISIONS[options.precision])
config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(base, config, autocast_adapter_dtype=options.adapters == "fp32").to(device)
model.train()
parameters = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0)
rows = batch(base.config.vocab_size, options.rows, options.length, options.chat)
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
forward = torch.compile(model) if options.compile else model


def step() -> float:
    loss = forward(**given).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if device != "cpu":
        getattr(torch, device).synchronize()
    return float(loss.detach())


serve(options, step)
