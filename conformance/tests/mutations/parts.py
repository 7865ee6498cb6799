"""The table of mutations of a database's parts, each with the test that must find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import topicstore as ts
from changes import also, argument, late, lie, result, stale
from database import forget_position
from running import M, suites_of
from topicstore.lifecycle import expiry, retention
from topicstore.lifecycle.archives import Archives
from topicstore.lifecycle.retention import Retention
from topicstore.lifecycle.retention_policy import RetentionSettings
from topicstore.pubsub import persistence_rules, retained, retained_lookup
from topicstore.pubsub import publish as publishing
from topicstore.pubsub.durable_filters import DurableFilters
from topicstore.pubsub.notifier import Notifier
from topicstore.pubsub.persistence_rules import PersistenceRules
from topicstore.pubsub.retained_expiry import EarliestEnd
from topicstore.pubsub.subscription import Subscription
from topicstore.queues.queue import Queue
from topicstore.queues.queues import Queues
from topicstore.sessions import Publish, Session, Sessions, Will, deliver, qos2
from topicstore.sessions import publish as receiving
from topicstore.sessions.commits import Commits
from topicstore.sessions.connect import Opening
from topicstore.sessions.delivery_batch import Permit
from topicstore.sessions.in_flight import MAX_PACKET_ID, InFlight
from topicstore.sessions.overlapping_cursor import FilterOverlaps
from topicstore.sessions.session_store import SessionState, StoredCounts
from topicstore.shard.generations import Generations
from topicstore.shard.rewriter import Rewriter
from topicstore.shard.state import FrameworkWrite
from topicstore.shard.writer import WritePolicy
from topicstore.storage.directory import manifest
from topicstore.storage.directory.directory_lock import DirectoryLock
from topicstore.storage.generations import drop_generation
from topicstore.storage.keyed_messages import state_key
from topicstore.storage.opening import ShardOpener
from topicstore_backends.rocksdb import RocksdbEngine
from topicstore_conformance.parts.suite import DatabasePartsSuite
from topicstore_conformance.subjects.pairs import Pair, pair_of

Call = Callable[..., Any]
Given = dict[str, Any]
DAY = 86_400_000_000

# the classes and modules that the table's rows name
DATABASE, SESSIONS, SESSION, QUEUE, QUEUES, POLICY = ts.Database, Sessions, Session, Queue, Queues, WritePolicy
PUBLISHING, LOOKUP, SUBSCRIPTION, RETENTION, NOTIFIER = publishing, retained_lookup, Subscription, Retention, Notifier
GENERATIONS, ENGINE, OPENER = Generations, RocksdbEngine, ShardOpener
RECEIVING, QOS2, IN_FLIGHT, COMMITS, OPENING = receiving, qos2, InFlight, Commits, Opening
FILTERS, RULES, RULE, RETAINED = DurableFilters, PersistenceRules, persistence_rules, retained
EXPIRY, STORED_SESSIONS, PERMIT, COUNTS, ENDS = expiry, SessionState, Permit, StoredCounts, EarliestEnd
LEAPS, ARCHIVES, REWRITER, LOCK = retained_lookup.TopicLeaps, Archives, Rewriter, DirectoryLock
MANIFEST, DELIVERIES, OVERLAPS = manifest, deliver, FilterOverlaps


def subject_of(row: M) -> Pair:
    return pair_of(*row.on.split("-"))


# --- changes -----------------------------------------------------------------------------------


def state_apart(call: Call, me: Any, given: Given) -> Any:
    """Write the state after the messages, in a write of its own."""
    found = call(state={})
    for shard, writes in given["state"].items():
        given["storage"].state(shard).write(writes)
    return found


def clear_retained(me: Any, given: Given) -> None:
    me.publish([ts.Message(message.topic, b"", retain=True) for message in me.retained("#")])


def acknowledged(call: Call, me: Any, given: Given) -> Any:
    """Acknowledge each delivered message before the client does."""
    found = call()
    me.puback(*(item.packet_id for item in found if isinstance(item, Publish)))
    me.checkpoint()
    return found


def without_first(found: Any) -> Any:
    return attrs.evolve(found, messages=found.messages[1:], read_slice=None)


def from_the_beginning(start: Any) -> Any:
    return 0 if start is not None and not isinstance(start, int) else start


def in_two(call: Call, me: Any, given: Given) -> Any:
    rows = list(given["messages"])
    return call(messages=rows[:2]) + call(messages=rows[2:])


def committed_in_two(call: Call, me: Any, given: Given) -> Any:
    return call(upto=me.peek(1).ids[0]) + call()


def read_again(me: Any, given: Given) -> None:
    me._read = 0


def gone_when_read(call: Call, me: Any, given: Given) -> None:
    """Drop the generations of a queue whose messages were read, although they are not committed."""
    record, me._record = me._record, msgspec.structs.replace(me._record, head=me._read)
    call()
    me._record = record


def ids_in_turn(call: Call, me: Any, given: Given) -> Any:
    """Assign packet ids in sequence, whether or not they are in use."""
    return [(me.next_id - 1 + number) % MAX_PACKET_ID + 1 for number in range(given["count"])]


def without_condition(call: Call, me: Any, given: Given) -> bool:
    """Remove an expired retained message, even if it was replaced meanwhile."""
    key = retained.key_of(given["topic"])
    given["storage"].state(given["shard"]).write([FrameworkWrite(state_key(key), None)])
    return True


def of_any_rules(call: Call, me: Any, given: Given) -> Any:
    """Return the stored progress, even if it was recorded for filters that have been replaced."""
    stored = given["storage"].state(given["shard"]).get(expiry._KEY)
    return {} if stored is None else expiry._decode(expiry._KEY, stored).reached


def days_later(days: float) -> Any:
    """Run retention with a later time."""
    return lambda call, me, given: call(now=me._storage().clock() + int(days * DAY))


def drop_oldest(me: Any, given: Given) -> None:
    storage = me._storage()
    oldest = storage.shards[0].generations.listed()[0].number
    if oldest < storage.shards[0].generations.current:
        drop_generation(storage, oldest)


def store_defaults(me: Any, given: Given) -> None:
    me._storage().state(0).write([FrameworkWrite(retention._KEY, retention._encode(RetentionSettings()))])


def if_archived(changed: Callable[[Any], Any]) -> Any:
    return lambda call, me, given: changed(call()) if len(me.archives) else call()


LOST = {"DATABASE.replay": if_archived(lambda messages: iter(list(messages)[1:]))}
CLEAN = {"SESSIONS.open": argument(clean_start=True)}
STAYS = {"GENERATIONS.drop": lie(True), "DATABASE.drop_generation": lie(True)}
TICK = {"SESSIONS.tick": lie(0.0)}
DELIVERED = {"SESSION.deliver": result(lambda items: items[1:])}
AGAIN = {"DATABASE.subscribe": argument(start=from_the_beginning)}
FETCHED = {"SUBSCRIPTION.fetch": result(without_first)}
CLEARED = {"PUBLISHING.retained_rows": result(lambda found: (found[0], {}))}
UNASKED = {"PUBLISHING._asked": lie(False)}
MEMORY, DISK = "memory-block", "rocksdb-block"
ERRORS = (ts.TopicstoreError, OverflowError, ValueError, KeyError)
# fmt: off
ROWS = [
    *(M("nothing", "", {}, on) for on in (MEMORY, DISK)),
    # --- arguments ---
    M("rules may have any client id", "test_wrong_arguments_change_nothing", {"RULE.check_utf8": lie("")}, MEMORY, raises=ERRORS),
    M("the highest identifier is refused", "test_extreme_arguments_are_accepted", {"SESSION.subscribe": argument(subscription_identifier=lambda number: number + (number > 7))}, MEMORY),
    # --- reports ---
    M("a generation has more bytes", "test_reports_of_generations", {"REWRITER._replace_locked": argument(freed=lambda freed: -freed)}, MEMORY),
    M("databases are made in 1970", "test_reports_of_the_creation", {"MANIFEST.format_time": result(lambda text: "1970" + text[4:])}, MEMORY),
    M("single messages aren't counted", "test_reports_of_topics", {"DATABASE.topics": result(lambda found: [one for one in found if one.messages > 1])}, MEMORY, raises=ERRORS),
    M("deletes are counted twice", "test_reports_of_work", {"DATABASE.info": result(lambda info: attrs.evolve(info, shards=[*info.shards, *info.shards]))}, MEMORY),
    M("nothing waits to be sent again", "test_reports_of_sessions", {"SESSION.status": result(lambda status: attrs.evolve(status, to_resend=0))}, MEMORY),
    M("no window is full", "test_reports_of_subscriptions", {"SUBSCRIPTION.status": result(lambda status: attrs.evolve(status, stuck=False))}, MEMORY),
    # --- publishing and retained messages ---
    M("empty payloads clear nothing", "test_the_last_retained_message_counts", CLEARED, MEMORY),
    M("retained messages are in reverse", "test_retained_messages_are_found_by_filter", {"LOOKUP.retained": result(lambda found: found[::-1])}, MEMORY, brief=True),
    M("leaps pass the next match", "test_retained_messages_are_found_among_many", {"LEAPS.after": result(lambda text: text and text + "~")}, MEMORY),
    M("publishers can't ask for persistence", "test_what_is_stored_is_chosen", UNASKED, MEMORY),
    M("empty payloads clear nothing", "test_retained_messages_outlast_reopening", CLEARED, DISK),
    M("retained messages go with a generation", "test_retained_messages_outlive_generations", {"DATABASE.drop_generation": also(clear_retained)}, MEMORY),
    M("retained messages last a microsecond more", "test_retained_messages_expire", {"LOOKUP.retained": argument(now=lambda now: now - 1)}, MEMORY),
    M("state is written after the messages", "test_a_killed_publish", {"PUBLISHING._store": state_apart}, DISK, raises=ERRORS),
    M("writes wait for the next", "test_a_killed_publisher", {"ENGINE.write": late}, DISK, raises=ERRORS),
    M("state is left out", "test_state_is_committed_with_a_publish", {"PUBLISHING._store": argument(state={})}, MEMORY),
    M("routed messages have no time", "test_routed_messages_are_whole", {"PUBLISHING._route": argument(now=0)}, MEMORY),
    M("only 1 asks", "test_publishers_ask_by_either_value", {"PUBLISHING._asks": lambda call, me, given: (publishing.PERSIST, "1") in given["properties"].user_properties}, MEMORY),
    M("rules have no lowest QoS", "test_rules_have_publishers_and_levels", {"RULES.add": argument(least_qos=0)}, MEMORY),
    M("nothing is due", "test_stores_cause_the_removal_of_expired_messages", {"ENDS.expect": lie()}, MEMORY, brief=True),
    M("what replaced an expired message goes with it", "test_replaced_messages_do_not_expire", {"RETAINED._remove_expired": without_condition}, MEMORY),
    # --- sessions ---
    M("deliveries lack their first message", "test_each_message_once", DELIVERED, MEMORY),
    M("every start is clean", "test_sessions_outlast_reopening", CLEAN, DISK, raises=ERRORS),
    M("every start is clean", "test_retained_messages_in_flight_outlast_reopening", CLEAN, DISK, raises=ERRORS),
    M("dropped generations stay", "test_dropped_generations_reach_no_session", STAYS, MEMORY, raises=ERRORS),
    M("deletes do nothing", "test_deleted_messages_hold_nothing_up", {"DATABASE.delete": lie(1)}, MEMORY),
    M("sessions don't expire", "test_sessions_expire", TICK, MEMORY),
    M("nobody is kicked", "test_kicked_clients_are_lost", {"SESSIONS.kick": lie(False)}, MEMORY),
    M("intervals are sent whole", "test_expired_messages_are_not_sent", {"SESSION.deliver": result(lambda items: [msgspec.structs.replace(item, expiry=None) for item in items])}, MEMORY),
    M("a second is lost", "test_what_is_left_of_an_interval", {"SESSION.deliver": result(lambda items: [msgspec.structs.replace(item, expiry=item.expiry and item.expiry - 1) for item in items])}, MEMORY),
    M("wills have no delay", "test_wills_outlast_reopening", {"SESSIONS.open": argument(will=lambda will: will and Will(will.message))}, DISK),
    M("deliveries are acknowledged at once", "test_a_killed_delivery", {"SESSION.deliver": acknowledged}, DISK),
    M("PUBRECs are forgotten", "test_exactly_once", {"SESSION.pubrec": lie(0)}, DISK),
    M("wills wait twice as long", "test_wills_come_with_the_end_of_a_session", {"SESSIONS.open": argument(will=lambda will: will and Will(will.message, 2 * will.delay))}, MEMORY),
    M("wills are published after a DISCONNECT", "test_wills_of_clients_that_return", {"SESSION.disconnect": argument(send_will=True)}, DISK),
    M("deliveries lack the first", "test_wills_reach_sessions_that_are_away", DELIVERED, DISK),
    # --- packet ids ---
    M("every row of a call is new", "test_repetitions_within_a_call_are_stored_once", {"RECEIVING.new_messages": lambda call, me, given: (list(given["rows"]), call()[1])}, MEMORY),
    M("packet ids of clients aren't stored", "test_repetitions_after_reopening_are_stored_once", {"RECEIVING.writes_of": lie({})}, DISK),
    M("PUBRELs aren't stored", "test_released_ids_can_be_used_again", {"QOS2._removals": lie([])}, DISK),
    M("PUBRELs free the window", "test_the_window_counts_all_exchanges", {"IN_FLIGHT.room": lambda call, me, given: call() + len(me.awaiting_pubcomp)}, MEMORY),
    M("packets aren't counted", "test_limits_count_what_is_sent_again", {"DELIVERIES.count_of": lie(0)}, MEMORY),
    M("packet ids are given in turn", "test_a_packet_id_is_given_once", {"IN_FLIGHT.free_ids": ids_in_turn}, MEMORY),
    M("a take-over commits nothing", "test_acknowledgements_outlast_a_take_over", {"COMMITS.checkpoint": lie([])}, MEMORY),
    M("every PUBREC accepts", "test_a_refused_message_is_over", {"SESSION.pubrec": argument(accepted=True)}, MEMORY),
    M("ended sessions count", "test_bounded_sessions", {"COUNTS.add": argument(change=lambda change: max(change, 0))}, MEMORY, raises=ERRORS),
    # --- subscriptions of sessions ---
    M("retained messages are always sent", "test_retained_messages_are_sent_as_asked", {"SESSION.subscribe": argument(retain_handling=0)}, MEMORY),
    M("identifiers are forgotten", "test_flags_of_messages", {"SESSION.subscribe": argument(subscription_identifier=0)}, MEMORY),
    M("no_local is forgotten", "test_own_messages_are_left_out", {"SESSION.subscribe": argument(no_local=False)}, MEMORY),
    M("an UNSUBSCRIBE does nothing", "test_overlapping_subscriptions_end_alone", {"SESSION.unsubscribe": lie(True)}, MEMORY),
    M("ended filters stay", "test_overlapping_subscriptions_follow_each_other", {"OVERLAPS.remove": lie()}, MEMORY),
    M("identifiers are forgotten", "test_overlapping_subscriptions_send_again", {"SESSION.subscribe": argument(subscription_identifier=0)}, DISK),
    M("every start is clean", "test_options_outlast_reopening", CLEAN, DISK, raises=ERRORS),
    M("an UNSUBSCRIBE does nothing", "test_nothing_comes_after_an_unsubscribe", {"SESSION.unsubscribe": lie(True)}, DISK),
    M("filters are wanted for ever", "test_only_wanted_messages_are_stored", {"FILTERS.remove": lie()}, MEMORY),
    M("records stay when sessions expire", "test_nothing_is_left_of_what_ended", {"STORED_SESSIONS.remove": lie(True)}, MEMORY),
    M("no start is clean", "test_a_clean_start_begins_anew", {"SESSIONS.open": argument(clean_start=False)}, MEMORY),
    M("what expired is resumed", "test_a_session_that_expired_unnoticed", {"OPENING._resumed": lambda call, me, given: given["found"]}, DISK),
    M("twice as much is kept", "test_bounded_backlogs_lose_the_oldest", {"SESSIONS.bound_backlogs": argument(max_messages=lambda most: most and 2 * most)}, DISK),
    M("what was missed isn't counted", "test_late_sessions_miss_the_oldest_routed_messages", {"SESSION.status": result(lambda status: attrs.evolve(status, missed=0))}, MEMORY),
    M("changed identifiers are forgotten", "test_changed_subscriptions_keep_their_messages", {"SESSION.subscribe": argument(subscription_identifier=0)}, MEMORY),
    M("everything is allowed", "test_refused_messages_are_not_sent", {"SESSIONS.open": argument(allow=None)}, MEMORY),
    M("bytes have no limit", "test_deliveries_of_some_bytes", {"SESSION.deliver": argument(max_bytes=None)}, MEMORY),
    M("nothing pauses", "test_paused_sessions_are_sent_nothing", {"SESSION.pause": lie()}, MEMORY),
    M("no answer is an answer", "test_undecided_messages_wait", {"PERMIT._ask": result(lambda answers: [answer is not False for answer in answers])}, MEMORY),
    # --- shared subscriptions ---
    M("shared subscriptions aren't shared", "test_each_message_to_one_member", {"SESSION.subscribe": argument(topic_filter=lambda text: text.removeprefix("$share/group/"))}, MEMORY),
    M("everything is allowed", "test_refused_messages_go_to_other_members", {"SESSION.restrict": argument(allow=None)}, MEMORY),
    M("every start is clean", "test_groups_outlast_reopening", CLEAN, DISK),
    M("dropped generations stay", "test_groups_outlive_generations", STAYS, MEMORY, raises=ERRORS),
    M("members don't expire", "test_an_expired_member_leaves_its_messages", TICK, MEMORY),
    M("members leave nothing", "test_what_was_sent_at_qos_2_goes_to_no_other_member", {"STORED_SESSIONS.revocable": lie([])}, MEMORY),
    M("every start is clean", "test_a_killed_group", CLEAN, DISK, raises=ERRORS),
    # --- subscriptions ---
    M("fetches lack their first message", "test_stored_then_new", FETCHED, MEMORY, brief=True),
    M("places are the beginning", "test_places_outlast_reopening", AGAIN, DISK),
    M("nobody is woken", "test_waiting_followers_are_woken", {"NOTIFIER.notify": lie()}, MEMORY, brief=True),
    M("dropped generations aren't reported", "test_followers_pass_dropped_generations", {"SUBSCRIPTION.fetch": result(lambda found: attrs.evolve(found, dropped=()))}, MEMORY),
    M("retention does nothing", "test_followers_pass_expired_messages", {"RETENTION.run": lie()}, MEMORY, brief=True),
    M("places are the beginning", "test_a_killed_follower", AGAIN, DISK),
    # --- queues ---
    M("queues are in reverse", "test_first_in_first_out", {"QUEUE.peek": result(lambda found: attrs.evolve(found, messages=found.messages[::-1]))}, MEMORY),
    M("every policy drops the newest", "test_bounds", {"QUEUES.open": argument(overflow="drop_newest")}, MEMORY),
    M("commits do nothing", "test_queues_outlast_reopening", {"QUEUE.commit": lie(0)}, DISK),
    M("queues go with a generation", "test_queues_outlive_generations", {"DATABASE.drop_generation": also(lambda me, given: me.queues.open("q").commit((1 << 64) - 1))}, MEMORY),
    M("appends are made in two", "test_a_killed_append", {"QUEUE.append": in_two}, DISK),
    M("commits are made in two", "test_a_killed_commit", {"QUEUE.commit": committed_in_two}, DISK),
    M("a commit begins the reading anew", "test_commits_move_the_reading", {"QUEUE.commit": also(read_again)}, MEMORY),
    M("a byte more is counted", "test_counts_of_queues", {"QUEUES.__getitem__": result(lambda info: attrs.evolve(info, bytes=info.bytes + 1))}, MEMORY),
    M("generations go when they were read", "test_large_queues_keep_what_was_read", {"QUEUE._drop_passed": gone_when_read}, DISK, raises=ERRORS),
    M("bounds don't change", "test_changed_bounds_outlast_reopening", {"QUEUE.bound": lie()}, DISK),
    M("queues aren't dropped", "test_a_dropped_queue_is_gone", {"QUEUES.drop": lie(True)}, DISK),
    # --- retention ---
    M("a run drops the oldest generation", "test_nothing_goes_without_a_limit", {"RETENTION.run": also(drop_oldest)}, MEMORY),
    M("a run is days ahead", "test_young_messages_stay", {"RETENTION.run": days_later(1.5)}, MEMORY),
    M("filters are ignored", "test_filters_have_ages_of_their_own", {"RETENTION.set": argument(filters={})}, MEMORY),
    M("half of the bytes go", "test_the_oldest_go_first", {"RETENTION.set": argument(max_bytes=lambda most: most // 2 if isinstance(most, int) else most)}, MEMORY),
    M("settings aren't stored", "test_settings_outlast_reopening", {"RETENTION.set": also(store_defaults)}, DISK),
    M("the wall clock is trusted", "test_a_clock_that_jumps_ahead_removes_nothing", {"RETENTION.run": days_later(0)}, MEMORY),
    M("a run is days ahead", "test_a_killed_run", {"RETENTION.run": days_later(2)}, DISK),
    M("topics lack the first", "test_removed_messages_are_counted_nowhere", {"DATABASE.topics": result(lambda tallies: tallies[1:])}, MEMORY),
    M("full databases always drop", "test_full_databases_refuse_or_drop", {"RETENTION.set": argument(when_full="drop")}, DISK),
    M("new filters begin where the old ones ended", "test_changed_filters_apply_to_old_messages", {"EXPIRY._reached": of_any_rules}, DISK),
    M("a run is seconds ahead", "test_filters_remove_nothing_that_is_new", {"RETENTION.run": days_later(0.0002)}, MEMORY),
    M("stores cause no run", "test_stores_cause_removals", {"RETENTION._wake_if_due": lie()}, MEMORY, brief=True),
    M("stores cause no run", "test_stores_cause_removals_by_filter", {"RETENTION._wake_if_due": lie()}, MEMORY, brief=True),
    M("an outlook drops a generation", "test_an_outlook_changes_nothing", {"RETENTION.outlook": also(drop_oldest)}, MEMORY),
    # --- archives ---
    M("archives lack messages", "test_archived_messages_read_as_before", LOST, MEMORY),
    M("archives lack messages", "test_any_messages_of_an_archive_can_be_selected", LOST, MEMORY),
    M("topics of archives are missing", "test_archived_messages_are_counted", {"DATABASE.topics": if_archived(lambda tallies: tallies[1:])}, MEMORY),
    M("archives have no streams", "test_streams_of_archives", {"DATABASE.streams": lie([])}, MEMORY),
    M("what was there isn't counted", "test_reports_of_exports", {"ARCHIVES.archive": result(lambda report: attrs.evolve(report, slabs_before=0))}, MEMORY),
    M("archives lack messages", "test_archives_outlast_reopening", LOST, DISK),
    M("dropped generations stay", "test_a_dropped_archive_is_gone", STAYS, MEMORY),
    M("fetches lack their first message", "test_followers_read_archives", FETCHED, MEMORY, brief=True),
    M("nothing is archived", "test_expired_generations_are_archived", {"RETENTION.set": argument(archive_to=None)}, MEMORY),
    M("archives lack messages", "test_a_killed_archiving", LOST, DISK),
    # --- whole databases ---
    M("clocks aren't bounded", "test_any_clock", {"POLICY.now": lambda call, me, given: me.clock()}, MEMORY, raises=ERRORS),
    M("positions begin anew", "test_clocks_that_jump", {"OPENER.open": forget_position}, DISK, raises=ts.DataLossError),
    M("replays are in reverse", "test_clocks_that_jump", {"DATABASE.replay": result(lambda messages: iter(list(messages)[::-1]))}, DISK),
    M("only the first shard's state is checked", "test_conditions_on_several_shards", {"DATABASE.store": argument(state=lambda state: {0: state[0]} if state and 0 in state else state)}, MEMORY),
    M("counts of topics are stale", "test_nothing_is_left_of_a_dropped_generation", {"DATABASE.topics": stale(lambda given: 0)}, MEMORY),
    M("keys of dropped generations stay", "test_nothing_is_left_of_a_dropped_generation", {"GENERATIONS._remove": lie()}, MEMORY, raises=ERRORS),
    M("state goes with a generation", "test_what_outlives_generations", {"DATABASE.drop_generation": also(lambda me, given: me.state(0).write([ts.StateWrite(b"key", None)]))}, MEMORY),
    M("ends belong to ranges", "test_ends_of_ranges", {"DATABASE.replay": argument(until=lambda until: until + 1 if isinstance(until, int) else until)}, MEMORY),
    M("nobody holds the lock", "test_one_opening_at_a_time", {"LOCK._lock": lie()}, DISK, raises=ERRORS),
    M("timestamps are those of positions", "test_timestamps", {"DATABASE.replay": argument(by="position")}, MEMORY),
    M("deletes are miscounted", "test_deletes_between_generations", {"DATABASE.delete": result(lambda count: count + 1)}, MEMORY),
    # --- histories ---
    M("publishers can't ask for persistence", "test_publishing_histories", UNASKED, MEMORY),
    M("fetches lack their first message", "test_subscription_histories", FETCHED, MEMORY),
    M("deliveries of many lack the first", "test_sessions_histories", {"SESSIONS.deliver_batches": result(lambda found: found[1:])}, MEMORY),
    M("deliveries lack the first", "test_overlapping_histories", DELIVERED, MEMORY),
    M("deliveries lack the first", "test_shared_histories", DELIVERED, MEMORY),
    M("queues are in reverse", "test_queue_histories", {"QUEUE.peek": result(lambda found: attrs.evolve(found, messages=found.messages[::-1]))}, DISK),
    M("a run is a day ahead", "test_retention_histories", {"RETENTION.run": days_later(1)}, MEMORY),
]
# fmt: on
globals().update(suites_of("parts", DatabasePartsSuite, ROWS, subject_of, "pair"))
