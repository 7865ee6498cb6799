"""The registration of the layout with topicstore."""

from topicstore import hookimpl
from topicstore.contract.plugin_specs import LayoutSpec


@hookimpl
def topicstore_layouts():
    """Return the layout's specification."""
    return [
        LayoutSpec(
            name="per_topic",
            target="topicstore_per_topic.layout:PerTopicLayout",
            summary="A stream for every topic: exact topics read nothing else. For some thousand topics.",
            capabilities=("position_order",),
        )
    ]
