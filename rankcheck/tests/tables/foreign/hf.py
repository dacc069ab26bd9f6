"""A Hugging Face Trainer, as its documentation shows one."""
import sys

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Tokens(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(100, (640, 16), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


class LanguageModelTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Report(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print("step", state.global_step)


torch.manual_seed(0)
config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=100,
                    n_positions=16)
args = TrainingArguments(
    output_dir=sys.argv[1], per_device_train_batch_size=8, max_steps=100,
    learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=5,
    save_steps=2, report_to="none", disable_tqdm=True)
trainer = LanguageModelTrainer(
    model=GPT2LMHeadModel(config), args=args, train_dataset=Tokens(),
    callbacks=[Report()])
trainer.train(resume_from_checkpoint="resume" in sys.argv)
