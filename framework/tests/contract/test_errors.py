"""All errors are documented, derive from `TopicstoreError`, and can be pickled."""

from __future__ import annotations

import inspect
import pickle

import pytest
from topicstore.contract import errors
from topicstore.contract.errors import RecoverableError, TopicstoreError, UnrecoverableError

ALL = [getattr(errors, name) for name in errors.__all__]
FAMILIES = (RecoverableError, UnrecoverableError)


def test_every_error_is_published() -> None:
    """`__all__` names every class of the module, in order, and nothing else."""
    here = [
        name for name, thing in vars(errors).items() if inspect.isclass(thing) and thing.__module__ == errors.__name__
    ]
    assert sorted(here) == errors.__all__


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_every_error(error: type[Exception]) -> None:
    """Each error class is documented, derives from one base class, keeps its text, and can be pickled for Spark."""
    assert error.__doc__ is not None
    assert error.__doc__.rstrip().endswith(".")
    assert error.__name__.endswith("Error")
    assert issubclass(error, TopicstoreError)
    assert (error is not TopicstoreError) == sum(issubclass(error, family) for family in FAMILIES)
    first = error("the bus is late")
    second = pickle.loads(pickle.dumps(first))
    assert (error, "the bus is late", vars(first)) == (type(second), str(second), vars(second))


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InvalidArgumentError, ValueError),
        (errors.DatabaseNotFoundError, FileNotFoundError),
        (errors.UnknownPluginError, LookupError),
        (errors.BackendUnavailableError, ImportError),
    ],
)
def test_errors_are_also_what_python_calls_them(error: type[Exception], builtin: type[Exception]) -> None:
    """An error with an equivalent in Python is a subclass of the built-in error."""
    assert issubclass(error, builtin)


def test_a_message_error_names_the_message() -> None:
    """An index is part of the error's text; text and index survive pickling."""
    for error in (errors.InvalidMessageError, errors.MessageTooLargeError, errors.LateMessageError):
        for one in (error("late", 3), pickle.loads(pickle.dumps(error("late", 3)))):
            expected = ("message 3 of the batch: late", "late", 3)
            assert expected == (str(one), one.reason, one.index)
        expected_alone = ("late", "late", None)
        assert expected_alone == (str(error("late")), error("late").reason, error("late").index)


def test_corruption_names_its_place() -> None:
    """The error's text begins with the location of the corruption; text and location survive pickling."""
    for one in (
        errors.CorruptionError("bad checksum", "block 7"),
        pickle.loads(pickle.dumps(errors.CorruptionError("bad checksum", "block 7"))),
    ):
        expected = ("block 7: bad checksum", "bad checksum", "block 7")
        assert expected == (str(one), one.reason, one.place)
