"""Kill a process full of publishers and durable subscribers repeatedly, and check what was delivered."""

import subprocess
import sys
from pathlib import Path

import topicstore as ts
from broker import ROOMS, SUBSCRIBERS, Client

BROKER = Path(__file__).with_name("broker.py")
KILLS = 3
PACKETS = 500
"""The least number of packets that the process delivers before it is killed."""


def run_and_kill(directory: Path) -> None:
    """Start the process, let it deliver `PACKETS` packets, and kill it with SIGKILL, without closing the database."""
    with subprocess.Popen([sys.executable, BROKER, directory], stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        print(process.stdout.readline().strip())
        delivered = 0
        while delivered < PACKETS:
            delivered += int(process.stdout.readline())
        process.kill()
    print("  killed")


def catch_up(directory: Path) -> None:
    """Resume all sessions, and deliver the remaining packets."""
    with ts.open(directory / "db") as db:
        clients = {client_id: Client(directory / client_id) for client_id in SUBSCRIBERS}
        for client_id in clients:
            db.sessions.open(client_id, expiry_interval=None)
        while delivered := db.sessions.deliver(1_000):
            for session, packets in delivered:
                clients[session.client_id].receive(session, packets)


def report(directory: Path) -> bool:
    """Compare each subscriber's file with the stored messages; return whether deliveries were as their QoS requires."""
    with ts.open(directory / "db") as db:
        stored = [f"{message.topic} {message.payload.decode()}" for message in db.replay("home/#")]
    print(f"{len(stored)} messages are stored, once each, of {len(ROOMS)} publishers")
    fine = True
    for client_id, (_, qos) in SUBSCRIBERS.items():
        log = (directory / client_id).read_text().splitlines()
        lines = [line.split(maxsplit=2)[2] for line in log if line.startswith("got")]
        got = [line.removesuffix(" again") for line in lines]
        firsts = list(dict.fromkeys(got))
        lost, repeated = set(stored) - set(got), len(got) - len(firsts)
        in_order = all(
            sorted(numbers) == numbers
            for room in ROOMS
            for numbers in [[int(line.split()[1]) for line in firsts if line.startswith(f"home/{room}/")]]
        )
        marked = sum(line.endswith(" again") for line in lines)
        print(
            f"{client_id} (QoS {qos}): {len(firsts)} delivered, {len(lost)} lost, {repeated} came twice, "
            f"{marked} marked as repetitions, each publisher's {'in order' if in_order else 'OUT OF ORDER'}"
        )
        fine = fine and not lost and in_order and repeated <= (marked if qos == 1 else 0)
    return fine


def main() -> None:
    """Kill the process `KILLS` times, resume the sessions, and report."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "sessions-data")
    directory.mkdir(parents=True, exist_ok=True)
    for _ in range(KILLS):
        run_and_kill(directory)
    catch_up(directory)
    sys.exit(0 if report(directory) else 1)


if __name__ == "__main__":
    main()
