"""Does any training script train on N processes as on one?

`python -m workshop verify -n 2 -- train.py --its-flags` runs the script,
unchanged, as one process and as two, for a few updates, and watches it:

    watch       what is recorded in each process: the check's observer, for
                scripts that know nothing of the course
    gpus        a CPU in the place of GPUs, for scripts that need them
    questions   what is asked, causes before effects
    resume      what a resume brings back
    command     runs the script, and prints the answers
"""
