"""What a question is: one of the check's, or one of verify's."""

from dataclasses import dataclass

# What is raised where a script leaves something that no question knows.
STRANGE = (ArithmeticError, AttributeError, LookupError, RuntimeError,
           TypeError, ValueError)


@dataclass(frozen=True)
class Question:
    """What is asked about a trial, or about a script's runs."""

    title: str  # what is right where the answer is "ok"
    answer: object  # function of what it is asked about
    kinds: tuple  # of trials: "whole", "uneven", "resumed", "stopped", ...
    where: object  # function of a trial or a `Case`: whether it is asked there
    early: bool  # also of a trial that has not come to its end


class Questions(list):
    """In the order in which they are asked: causes before their effects."""

    def add(self, title, kinds=("whole",), where=lambda _: True, early=False):
        """Ask the decorated function where `where` says so."""
        def add(answer):
            self.append(Question(title, answer, kinds, where, early))
            return answer

        return add
