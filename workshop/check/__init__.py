"""Check that a script computes what the single-device stage computes.

`python -m workshop check ddp` runs the working copy on each mesh of the
stage for a few steps of preset tiny, in fp32 on the CPU, and compares with
`solutions/train_gpt2_std.py`: contract 1 of the course. Then it resumes a
run, and sends a signal, as SLURM does.
"""
