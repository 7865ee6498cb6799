"""The errors: all documented, each in one family, and whole after a trip to another process."""

from __future__ import annotations

import inspect
import pickle

import pytest
from topicstore.contract import errors
from topicstore.contract.errors import RecoverableError, TopicstoreError, UnrecoverableError

ALL = [getattr(errors, name) for name in errors.__all__]
FAMILIES = {TopicstoreError, RecoverableError, UnrecoverableError}
KINDS = [error for error in ALL if error not in FAMILIES]

"""An `EngineError`, which is unrecoverable, of the one kind that is not."""


def test_every_error_is_published() -> None:
    """`__all__` names every class of the module, in order, and nothing else."""
    here = [
        name for name, thing in vars(errors).items() if inspect.isclass(thing) and thing.__module__ == errors.__name__
    ]
    assert sorted(here) == errors.__all__


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_every_error_is_documented(error: type[Exception]) -> None:
    """Each has a docstring of its own, of whole sentences, and a name that ends in Error."""
    assert error.__doc__ is not None
    assert error.__doc__.rstrip().endswith(".")
    assert error.__name__.endswith("Error")


@pytest.mark.parametrize("error", KINDS, ids=lambda error: error.__name__)
def test_every_error_is_of_one_family(error: type[Exception]) -> None:
    """Each is recoverable or unrecoverable, not both."""
    families = [family for family in (RecoverableError, UnrecoverableError) if issubclass(error, family)]
    assert 1 == len(families)


def test_the_families_are_apart() -> None:
    """Both families are topicstore's, and neither is of the other."""
    assert TopicstoreError in RecoverableError.__bases__
    assert TopicstoreError in UnrecoverableError.__bases__


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
    """Those with an equal among Python's own errors can be caught as such."""
    assert issubclass(error, builtin)


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_an_error_says_what_it_was_given(error: type[Exception]) -> None:
    """The text of an error is its reason, neither quoted nor wrapped."""
    reason = "the bus is late"
    assert reason == str(error(reason))


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_an_error_survives_pickling(error: type[Exception]) -> None:
    """Spark brings errors from its workers that way."""
    first = error("the bus is late")
    second = pickle.loads(pickle.dumps(first))
    assert error is type(second)
    assert (str(first), vars(first)) == (str(second), vars(second))


def test_a_message_error_names_the_message() -> None:
    """With an index the text names it; both parts are kept, also after pickling."""
    for error in (errors.InvalidMessageError, errors.MessageTooLargeError, errors.LateMessageError):
        for one in (error("late", 3), pickle.loads(pickle.dumps(error("late", 3)))):
            expected = ("message 3 of the batch: late", "late", 3)
            assert expected == (str(one), one.reason, one.index)
        expected_alone = ("late", "late", None)
        assert expected_alone == (str(error("late")), error("late").reason, error("late").index)


def test_corruption_names_its_place() -> None:
    """The place comes first in the text; both parts are kept, also after pickling."""
    for one in (
        errors.CorruptionError("bad checksum", "block 7"),
        pickle.loads(pickle.dumps(errors.CorruptionError("bad checksum", "block 7"))),
    ):
        expected = ("block 7: bad checksum", "bad checksum", "block 7")
        assert expected == (str(one), one.reason, one.place)
