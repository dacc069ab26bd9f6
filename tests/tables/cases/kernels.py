"""Scripts for the check of the lesson kernels."""

from cases.case import right, wrong

CASES = (
    wrong("the single-device script", "it has no function gelu", "std"),
    wrong("PyTorch's GELU in the model", "it trains with PyTorch's gelu",
          ("self.c_proj(gelu(self.c_fc(x)))", "self.c_proj(nn.functional."
           'gelu(\n            self.c_fc(x), approximate="tanh"))')),
    # masks
    wrong("no mask of what is written", "gelu: gelu_forward writes outside of "
          "its tensors", ("tile * tl.sigmoid(2 * u), i < N)",
                          "tile * tl.sigmoid(2 * u))")),
    wrong("a row is written beyond its end",
          "layer_norm: layer_norm_forward writes outside",
          ("tl.store(x + at, tile, inside)", "tl.store(x + at, tile)")),
    wrong("zeros beyond the row become -mean", "layer_norm: its output is off",
          ("tl.where((columns < N)[None, :], tile - mean[:, None], 0.0)",
           "tile - mean[:, None]")),
    wrong("no mask of later keys", "attention: its output is off",
          ("(queries[:, None] >= keys[None, :]) & (",
           "(keys[None, :] < 10**6) & (")),
    # sums over tiles and programs
    wrong("a program's own rows alone", "layer_norm: its gradient of w is off",
          ("dw.sum(0)", "dw[0]")),
    # overflow
    wrong("no largest logit", "cross_entropy: its output overflows",
          ("larger = tl.maximum(largest, tl.max(tile, 1))",
           "larger = tl.zeros((ROWS,), tl.float32)")),
    # races
    wrong("all programs write to one row", "layer_norm: layer_norm_backward "
          "writes what another program reads or writes: a race",
          ("    at = program * N + columns\n", "    at = columns\n")),
    wrong("the gradient's tiles overlap",
          "cross_entropy: cross_entropy_backward",
          ("columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)",
           "columns = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, "
           "COLUMNS)")),
    wrong("an operation that fails",
          "gelu: NameError: name 'v' is not defined",
          ("tl.sigmoid(2 * u), i < N)", "tl.sigmoid(2 * v), i < N)")),
    # right
    right("other tiles",
          ("TILE = 2**15 if INTERPRETED else 2**12", "TILE = 2**14"),
          ("BLOCK = 256 if INTERPRETED else 64", "BLOCK = 128")),
    right("the gradient in memory of its own",
          ("        M, N = logits.shape\n        cross_entropy_backward[",
           "        logits = logits.clone()\n"
           "        M, N = logits.shape\n        cross_entropy_backward[")),
    right("the sum by atomic_add",
          ("torch.empty(2, programs, N, device=x.device)", "torch.zeros(2, 1, "
           "N, device=x.device)"), ("    at = program * N + columns\n", ""),
          ("tl.store(dw + at, tl.sum(dy * tile, 0), columns < N)",
           "tl.atomic_add(dw + columns, tl.sum(dy * tile, 0), columns < N)"),
          ("tl.store(db + at, tl.sum(dy, 0), columns < N)", "tl.atomic_add(db "
           "+ columns, tl.sum(dy, 0), columns < N)")),
)
