"""Scripts for the check of the lesson lit."""

from cases.case import right, wrong

FIT = "    trainer.fit(LitGPT(model, hp), train_data, val_data)\n"
LOSS = "return self.model(*batch)"
MODULE = """class LitGPT(L.LightningModule):
    def __init__(self, model, hp):
        super().__init__()
        self.model, self.hp = model, hp
"""
STREAM = """    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, data):
            self.data = data

        def __iter__(self):
            return self.data

"""


def loaders(arguments):
    """A change that makes a DataLoader of each DataIterator, `data`."""
    return (FIT, STREAM + f"    loaders = [torch.utils.data.DataLoader("
            f"{arguments})\n               for data in (train_data, val_data)]"
            "\n    trainer.fit(LitGPT(model, hp), *loaders)\n")


CASES = (
    wrong("a second writer of checkpoints", "the Trainer writes, too: "
          "ModelCheckpoint", ("enable_checkpointing=False",
                              "enable_checkpointing=True")),
    wrong("configure_model shards nothing",
          "with --strategy fsdp2 every rank keeps the whole model",
          ("in (*self.model.transformer.h, self.model)", "in ()")),
    wrong("the DDP script", "trainer.fit() is never called", "ddp"),
    # data
    wrong("two workers read the same", "samples of step 0",
          loaders("Stream(data), None, num_workers=2")),
    wrong("the loader of a list, shuffled", "samples of step 0", loaders(
        "[next(data) for _ in range(48)], None, shuffle=data is train_data")),
    # logging
    wrong("device given to the Trainer by auto", "the device does not follow "
          "from --device", ("accelerator=device.type", 'accelerator="auto"')),
    right("the solution"),
    right("the class renamed",
          ("class LitGPT(", "class Lightning("), ("LitGPT(m", "Lightning(m")),
    right("a loader without workers", loaders("Stream(data), None")),
    right("a batch index", ("def training_step(self, batch):",
                            "def training_step(self, batch, batch_idx):")),
    right("a dictionary for the loss",
          (LOSS, 'return {"loss": self.model(*batch)}')),
    right("a logged training loss",
          (LOSS, "loss = self.model(*batch)\n"
           '        self.log("train_loss", loss)\n        return loss')),
    right("a dictionary of the optimizer",
          ('return [optimizer], [{"scheduler": schedule, "interval": "step"}]',
           'return {"optimizer": optimizer, "lr_scheduler": {"scheduler": '
           'schedule, "interval": "step"}}')),
    right("a model that is the module",
          ("class GPT(nn.Module)", "class GPT(L.LightningModule)"),
          (MODULE, """class LitGPT(GPT):
    model = property(lambda self: self)

    def __init__(self, config, hp):
        super().__init__(config, hp.recompute)
        self.hp = hp
"""),
          ("self.model.configure_opt", "super().configure_opt"),
          ("model = GPT(config, hp.recompute)", "model = LitGPT(config, hp)"),
          ("fit(LitGPT(model, hp)", "fit(model")),
)
