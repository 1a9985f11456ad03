"""Hugging Face `Trainer`: save and resume checkpoints through dcp.

    python examples/huggingface_trainer.py --checkpoints /tmp/trainer
    torchrun --standalone --nproc-per-node 2 examples/huggingface_trainer.py --checkpoints /tmp/trainer

Stop the script in any way (SIGTERM, kill -9) and start it again. docs/how-to/use-a-trainer.md lists the saved
state.
"""

from __future__ import annotations

import json

import torch
from command_line import parser
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from dcp.integrations.huggingface import DcpTrainer


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Token sequences in which each token is the previous token plus three."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) * 3 + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train a tiny Llama, alone or as a rank of torchrun."""
    options = parser(__doc__)
    options.set_defaults(steps=200, every=50)
    arguments = options.parse_args()
    settings = TrainingArguments(
        output_dir=str(arguments.checkpoints),
        save_steps=arguments.every,
        save_total_limit=3,
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        logging_steps=1,
        report_to="none",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(0)  # same initial weights on all ranks
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    trainer = DcpTrainer(LlamaForCausalLM(config), settings, train_dataset=Sentences())
    last = None
    if arguments.checkpoints.is_dir():
        last = get_last_checkpoint(arguments.checkpoints)  # type: ignore[no-untyped-call]
    trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        arguments.losses.write_text("".join(json.dumps(entry) + "\n" for entry in history))


if __name__ == "__main__":
    main()
