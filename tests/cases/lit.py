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
    wrong("a second writer of checkpoints", "the Trainer writes, too: "
          "ModelCheckpoint", ("enable_checkpointing=False",
                              "enable_checkpointing=True")),
    wrong("configure_model shards nothing",
          "with --strategy fsdp2 every rank keeps the whole model",
          ("            for module in (*self.transformer.h, self):\n",
           "            for module in ():\n")),
    wrong("the DDP script", "trainer.fit() is never called", "ddp"),
    # the Trainer's arguments, each left out alone
    wrong("no accelerator but the CPU", "is always 'cpu' (line",
          ("accelerator=device.type", 'accelerator="cpu"')),
    # data
    wrong("two workers read the same", "samples of step 0",
          ("batch_size=None", "batch_size=None, num_workers=2")),
    wrong("batches of batches", "", ("batch_size=None", "batch_size=2")),
    wrong("the loader of a list, shuffled", "samples of step 0",
          (LOADER, "DataLoader([next(data) for _ in range(48)], "
           "batch_size=None, shuffle=data is train_data)")),
    # validation
    wrong("validation summed over ranks", "the validation loss of step",
          ("sync_dist=True", 'sync_dist=True, reduce_fx="sum"')),
    # logging
    wrong("logged loss of the last microbatch only",
          "the logged loss of step 0", *with_callback(
              "        def on_train_batch_end(self, trainer, module, outputs, "
              "*batch):\n            self.mean_loss.zero_()\n            loss "
              '= outputs["loss"] * trainer.accumulate_grad_batches\n'
              "            super().on_train_batch_end(\n"
              '                trainer, module, {"loss": loss}, *batch)\n')),
    wrong("device given to the Trainer by auto", "the device does not follow "
          "from --device", ("accelerator=device.type", 'accelerator="auto"')),
    right("the solution"),
    right("the class renamed",
          ("class GPT(L.LightningModule)", "class LitGPT(L.LightningModule)"),
          ("model = GPT(", "model = LitGPT(")),
    right("a batch index", ("def training_step(self, batch):",
                            "def training_step(self, batch, batch_idx):")),
    right("a dictionary for the loss",
          (LOSS, 'return {"loss": self(*batch)}')),
    right("a logged training loss",
          (LOSS, "loss = self(*batch)\n"
           '        self.log("train_loss", loss)\n        return loss')),
    right("a dictionary of the optimizer",
          ('return [optimizer], [{"scheduler": schedule, "interval": "step"}]',
           'return {"optimizer": optimizer, "lr_scheduler": {"scheduler": '
           'schedule, "interval": "step"}}')),
    right("a module that holds the model",
          ("class GPT(L.LightningModule)", "class GPT(nn.Module)"),
          ("    def configure_optimizers(self):\n"
           "        hp, max_steps = self.hp, self.trainer.max_steps\n",
           "    def optimizers(self, hp, max_steps):\n"),
          ("    def training_step(self, batch):",
           "\nclass Lit(L.LightningModule):\n"
           "    def __init__(self, config, hp):\n        super().__init__()\n"
           "        self.config, self.hp = config, hp\n"
           "        self.model = GPT(config, hp)\n\n"
           "    def configure_model(self):\n        if self.device_mesh and "
           "not isinstance(\n                self, FSDPModule):\n"
           "            for module in (*self.model.transformer.h, self):\n"
           "                fully_shard(module, mesh=self.device_mesh[\n"
           "                    'data_parallel'])\n\n"
           "    def configure_optimizers(self):\n"
           "        return self.model.optimizers(\n            self.hp, "
           "self.trainer.max_steps)\n\n    def forward(self, *batch):\n"
           "        return self.model(*batch)\n\n    def generate(self, "
           "*args):\n        return GPT.generate(self, *args)\n\n"
           "    def training_step(self, batch):"),
          ("raw_model = GPT(", "raw_model = Lit("),
          ("model = compile_model(\n"
           '        raw_model, device, each_block=hp.strategy != "ddp"\n'
           "    ) if hp.compile else raw_model", "if hp.compile:\n"
           "        raw_model.model = compile_model(raw_model.model, device, "
           'hp.strategy != "ddp")\n    model = raw_model'),
          warns="the checkpoint's names begin with model."),
)
