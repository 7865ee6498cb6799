"""Registers the layouts that come with topicstore, as any plugin would."""

from topicstore import hookimpl
from topicstore.contract.plugin_specs import LayoutSpec


@hookimpl
def topicstore_layouts() -> list[LayoutSpec]:
    """Return the layouts of this package."""
    return [
        LayoutSpec(
            name="reference",
            target="topicstore_layouts.reference:ReferenceLayout",
            summary="one value a message in order of position, everything scanned: the oracle",
            capabilities={"position_order", "few_streams"},
        ),
        LayoutSpec(
            name="wildcard_optimized",
            target="topicstore_layouts.wildcard_optimized.layout:WildcardOptimizedLayout",
            summary="keys of learned stream, epoch and a hash a varying level; wildcard filters leap from key to key",
            capabilities={"few_streams"},
            requires={"fast_seek"},
        ),
        LayoutSpec(
            name="skipstream",
            target="topicstore_layouts.skipstream.layout:SkipstreamLayout",
            summary="one value a message, an index entry a varying level; narrow filters leap between the entries",
            capabilities={"position_order", "few_streams"},
            requires={"fast_seek"},
        ),
        LayoutSpec(
            name="block",
            target="topicstore_layouts.block.layout:BlockLayout",
            summary="columnar, compressed blocks, one a batch; streams by learned topic structure",
            capabilities={"position_order", "few_streams"},
        ),
        LayoutSpec(
            name="table",
            target="topicstore_layouts.table:TableLayout",
            summary="one row a message in a table of typed columns, for SQL over the history",
            capabilities={"position_order", "few_streams"},
            requires={"sql"},
        ),
    ]
