"""Scripts for the check of the lesson lit."""

from cases.case import right, wrong

LOADER = "DataLoader(lit.Microbatches(data), batch_size=None)"
TRAINER = "    trainer = L.Trainer(\n"
LOSS = "return self(*batch)"


def with_callback(body):
    """Changes that put methods of a subclass in the callback's place."""
    return ((TRAINER, f"    class Own(lit.LitRun):\n{body}\n" + TRAINER),
            ("callbacks=[lit.LitRun(", "callbacks=[Own("))


CASES = (
    wrong("a second writer of checkpoints", "lit",
          (("enable_checkpointing=False", "enable_checkpointing=True"),),
          "the Trainer writes, too: ModelCheckpoint", suite=True),
    wrong("configure_model shards nothing", "lit",
          (("            for module in (*self.transformer.h, self):\n",
            "            for module in ():\n"),),
          "with --strategy fsdp2 every rank keeps the whole model"),
    wrong("the DDP script", "lit", "ddp", "trainer.fit() is never called"),
    # the Trainer's arguments, each left out alone
    wrong("no accelerator but the CPU", "lit",
          (("accelerator=device.type", 'accelerator="cpu"'),),
          "is always 'cpu' (line"),
    # data
    wrong("two workers read the same", "lit",
          (("batch_size=None", "batch_size=None, num_workers=2"),),
          "samples of step 0"),
    wrong("batches of batches", "lit", (("batch_size=None", "batch_size=2"),
                                        ), ""),
    wrong("the loader of a list, shuffled", "lit",
          ((LOADER, "DataLoader([next(data) for _ in range(48)], "
            "batch_size=None, shuffle=data is train_data)"),),
          "samples of step 0"),
    # validation
    wrong("validation summed over ranks", "lit",
          (("sync_dist=True", 'sync_dist=True, reduce_fx="sum"'),),
          "the validation loss of step"),
    # logging
    wrong("logged loss of the last microbatch only", "lit", with_callback(
        "        def on_train_batch_end(self, trainer, module, outputs, "
        "*batch):\n            self.mean_loss.zero_()\n            loss = "
        'outputs["loss"] * trainer.accumulate_grad_batches\n            '
        "super().on_train_batch_end(\n                trainer, module, "
        '{"loss": loss}, *batch)\n'),
        "the logged loss of step 0"),
    wrong("device given to the Trainer by auto", "lit",
          (("accelerator=device.type", 'accelerator="auto"'),),
          "the device does not follow from --device"),
    right("the solution", "lit", (), suite=True),
    right("the class renamed", "lit",
          (("class GPT(L.LightningModule)", "class LitGPT(L.LightningModule)"
            ), ("model = GPT(", "model = LitGPT("))),
    right("a batch index", "lit",
          (("def training_step(self, batch):",
            "def training_step(self, batch, batch_idx):"),)),
    right("a dictionary for the loss", "lit",
          ((LOSS, 'return {"loss": self(*batch)}'),)),
    right("a logged training loss", "lit",
          ((LOSS, "loss = self(*batch)\n        self.log("
            '"train_loss", loss)\n        return loss'),)),
    right("a dictionary of the optimizer", "lit",
          (('return [optimizer], [{"scheduler": schedule, '
            '"interval": "step"}]', 'return {"optimizer": optimizer, '
            '"lr_scheduler": {"scheduler": schedule, "interval": "step"}}'),
           )),
    right("a module that holds the model", "lit",
          (("class GPT(L.LightningModule)", "class GPT(nn.Module)"),
           ("    def configure_optimizers(self):\n"
            "        hp, max_steps = self.hp, self.trainer.max_steps\n",
            "    def optimizers(self, hp, max_steps):\n"),
           ("    def training_step(self, batch):",
            "\nclass Lit(L.LightningModule):\n"
            "    def __init__(self, config, hp):\n"
            "        super().__init__()\n"
            "        self.config, self.hp = config, hp\n"
            "        self.model = GPT(config, hp)\n\n"
            "    def configure_model(self):\n"
            "        if self.device_mesh and not isinstance(\n"
            "                self, FSDPModule):\n"
            "            for module in (*self.model.transformer.h, self):\n"
            "                fully_shard(module, mesh=self.device_mesh[\n"
            "                    'data_parallel'])\n\n"
            "    def configure_optimizers(self):\n"
            "        return self.model.optimizers(\n"
            "            self.hp, self.trainer.max_steps)\n\n"
            "    def forward(self, *batch):\n"
            "        return self.model(*batch)\n\n"
            "    def generate(self, *args):\n"
            "        return GPT.generate(self, *args)\n\n"
            "    def training_step(self, batch):"),
           ("raw_model = GPT(", "raw_model = Lit("),
            ("model = compile_model(\n        raw_model, device, each_block="
             "hp.strategy == \"fsdp2\"\n    ) if hp.compile else raw_model",
             "if hp.compile:\n        raw_model.model = compile_model("
             "raw_model.model, device, hp.strategy == \"fsdp2\")\n"
             "    model = raw_model")),
          "the checkpoint's names begin with model."),
)
