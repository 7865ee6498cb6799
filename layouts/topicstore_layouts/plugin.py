"""What this package registers."""

from topicstore import hookimpl
from topicstore.specs import LayoutSpec


@hookimpl
def topicstore_layouts() -> list[LayoutSpec]:
    """Return the layouts of this package."""
    return [
        LayoutSpec(
            name="reference",
            target="topicstore_layouts.reference:ReferenceLayout",
            summary="one value a message in order of position, everything scanned: the oracle",
            capabilities={"position_order"},
        ),
        LayoutSpec(
            name="block",
            target="topicstore_layouts.block.layout:BlockLayout",
            summary="columnar, compressed blocks, one a batch; streams by learned topic structure",
            capabilities={"position_order"},
        ),
    ]
