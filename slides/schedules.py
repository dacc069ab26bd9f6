"""When each pipeline stage computes what: by arithmetic.

An order is a list of ("F" or "B", microbatch) for each pipeline stage.
"""


def GPIPE(stage, stages, microbatches):
    """All microbatches forwards, then all backwards."""
    return [(kind, k) for kind in "FB" for k in range(microbatches)]


def ONE_F_ONE_B(stage, stages, microbatches):
    """A backward pass as soon as there is one."""
    ahead = min(stages - 1 - stage, microbatches)
    order = [("F", k) for k in range(ahead)]
    for k in range(microbatches - ahead):
        order += [("F", ahead + k), ("B", k)]
    return order + [("B", k) for k in range(microbatches - ahead,
                                            microbatches)]


def events(order, stages, microbatches, seconds=(1, 2)):
    """[name, microbatch, begin, end] of each stage's passes, in turn.

    seconds: of a pass forwards and backwards; what is sent takes no time.
    """
    left = [order(stage, stages, microbatches) for stage in range(stages)]
    done, now, out = {}, [0] * stages, [[] for _ in range(stages)]
    while any(left):
        for stage, todo in enumerate(left):
            while todo:
                kind, k = todo[0]
                before = (stage - 1 if kind == "F" else stage + 1, kind, k)
                ends = 0 <= before[0] < stages
                if ends and before not in done:
                    break
                begin = max(now[stage], done.get(before, 0))
                now[stage] = begin + seconds[kind == "B"]
                done[stage, kind, k] = now[stage]
                out[stage].append([kind, k, begin, now[stage]])
                todo.pop(0)
    return out


def idle(events):
    """The share of the time in which the stages wait, on average."""
    end = max(event[3] for stage in events for event in stage)
    busy = sum(end - begin for stage in events for *_, begin, end in stage)
    return 1 - busy / len(events) / end
