// Pause is the first process of a Pod: it keeps the Pod's namespaces, and reaps what other
// processes of the Pod leave when they share its PID namespace. With -v it ends at once:
// kubeadm upgrade runs that as a Job, to see whether Pods start.
package main

import (
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "-v" {
		return
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGCHLD)
	for s := range signals {
		if s != unix.SIGCHLD {
			return
		}
		for {
			if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 && err != unix.EINTR {
				break
			}
		}
	}
}
