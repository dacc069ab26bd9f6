"""Does any training script train on N processes as on one?

`rankcheck verify -n 2 -- train.py --its-flags` runs the script,
unchanged, as one process and as two, for a few updates, and watches it by the
probes of rankcheck/probes/training.py and rows.py:

    program     what is verified, as it is typed
    runs        the table of the runs, and which of them are compared
    comparison  those, and what is read out of them
    questions   what is asked, causes before effects
    resume      what a resume brings back
    command     runs the script, and prints the answers
"""
