"""Training steps with transformers and PEFT. Variants: plain, tuned, tuned-compiled."""

import torch
from peft import LoraConfig, get_peft_model
from protocol import arguments, serve
from shapes import batch
from transformers import AutoModelForCausalLM

options = arguments()
tuned, compiled = "tuned" in options.variant, "compiled" in options.variant
base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(base, config, autocast_adapter_dtype=not tuned)
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
padding = {"attention_mask": mask} if options.chat else {}
forward = torch.compile(model) if compiled else model


def step() -> float:
    loss = forward(input_ids=ids, labels=labels, **padding).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


serve(options.started, step)
