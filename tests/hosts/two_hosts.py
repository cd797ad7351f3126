"""Two hosts on one machine: namespaces with a network of their own, and a virtual cable between them.

Each host has a name, an address, a loopback device and processes of its own, and knows the other one's name. The file
system is shared, as on a cluster. This needs Linux, root, and the programs of Debian's util-linux and iproute2.
"""

import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

ADDRESSES = {"host-a": "10.77.0.1", "host-b": "10.77.0.2"}
KINDS = ("--net", "--uts", "--ipc", "--mount", "--pid")
"""Of namespaces, as unshare and nsenter name them."""
PROGRAMS = ("unshare", "nsenter", "ip", "tc")


def why_not() -> str | None:
    """The reason why this machine cannot have two hosts, or None."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"two hosts need {', '.join(missing)} (Debian's util-linux and iproute2)"
    try:
        TwoHosts().close()
    except subprocess.CalledProcessError as error:
        return f"this machine allows no network namespaces: {error.stderr.strip()}"
    return None


class Host:
    """The namespaces of one host. They end with its first process, and with them all its other processes.

    The first process waits for the end of its standard input, and so ends with the process of the tests.
    """

    def __init__(self, name):
        self.name = name
        first = f"hostname {name} && ip link set lo up && echo && exec cat"
        self.unshare = subprocess.Popen(
            ["unshare", *KINDS, "--mount-proc", "--fork", "--kill-child", "sh", "-c", first],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.unshare.stdout is not None
        if self.unshare.stdout.readline() != "\n":
            raise subprocess.CalledProcessError(1, "unshare", stderr=self.unshare.communicate()[1])
        children = Path(f"/proc/{self.unshare.pid}/task/{self.unshare.pid}/children")
        self.first_process = int(children.read_text())
        # Open, so that the network outlives the processes: the cable's other end would vanish with this one.
        self._network = open(f"/proc/{self.first_process}/ns/net")  # noqa: SIM115

    def on(self, *arguments):
        """The command line that runs a command on this host, in the same working directory."""
        return ["nsenter", f"--target={self.first_process}", *KINDS, f"--wdns={os.getcwd()}", *arguments]

    def run(self, line):
        """Run a command line on this host."""
        run(shlex.join(self.on(*shlex.split(line))))

    def kill(self):
        """End all processes of this host by SIGKILL."""
        if self.unshare.poll() is None:
            os.kill(self.first_process, signal.SIGKILL)
        self.unshare.wait()

    def close(self):
        """Let the network of this host end too."""
        self._network.close()


class TwoHosts:
    """host-a and host-b, and the cable between them."""

    def __init__(self):
        self.hosts = []
        try:
            for name in ADDRESSES:
                self.hosts.append(Host(name))
            one, other = (host.first_process for host in self.hosts)
            run(f"ip link add cable netns {one} type veth peer name cable netns {other}")
            names = "".join(f"{address} {name}\\n" for name, address in {"localhost": "127.0.0.1", **ADDRESSES}.items())
            for host in self.hosts:
                host.run(f"ip address add {ADDRESSES[host.name]}/24 dev cable")
                host.run("ip link set cable up")
                host.run("mount -t tmpfs none /mnt")
                host.run(f"sh -c \"printf '{names}' > /mnt/hosts\"")
                host.run("mount --bind /mnt/hosts /etc/hosts")
        except BaseException:
            self.close()
            raise

    def cut(self):
        """Cut the cable: no end of a connection learns of it."""
        self.hosts[0].run("ip link set cable down")

    def slow_down(self, rate):
        """Let the cable carry at most `rate` in each direction, such as 8mbit, and queue for up to two seconds."""
        for host in self.hosts:
            host.run(f"tc qdisc replace dev cable root tbf rate {rate} burst 16kb latency 2s")

    def close(self):
        """End both hosts."""
        for host in self.hosts:
            host.kill()
            host.close()


def run(line):
    """Run a command line on this machine."""
    subprocess.run(shlex.split(line), check=True, capture_output=True, text=True)
