package drops

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"spillway.dev/spillway/internal/node/conntrack"
)

// Target is the network namespace or the pod that a flag names. While drops are
// followed, another network namespace may replace it.
type Target struct {
	flag, name string
	found      []conntrack.Namespace
	cookies    []uint64
	addresses  []netip.Addr // of a pod
	gone       bool
}

// TargetCheck is the time between two checks whether a Target still exists.
const TargetCheck = time.Second

// NewTarget returns the target of flag ("--netns" or "--pod") with the namespaces of
// its name, and with the addresses of a pod.
func NewTarget(flag, name string, found []conntrack.Namespace, addresses []netip.Addr) *Target {
	t := &Target{flag: flag, name: name, found: found, addresses: addresses}
	for _, n := range found {
		t.cookies = append(t.cookies, Cookie(n))
	}
	return t
}

// Exists reports whether one of its namespaces still exists at its path.
func (t *Target) Exists() bool {
	return slices.ContainsFunc(t.found, func(n conntrack.Namespace) bool {
		cookie := Cookie(n)
		return cookie != 0 && slices.Contains(t.cookies, cookie)
	})
}

// Follow finds the target again, and makes watch follow a namespace that replaced it. It
// returns a line that reports a change; "" if nothing changed.
func (t *Target) Follow(list []conntrack.Namespace, watch func([]conntrack.Namespace, []Pod) ([]uint64, error)) (string, error) {
	// The namespace exists; its first process has ended, or its name was removed.
	if i := slices.IndexFunc(list, func(n conntrack.Namespace) bool { return slices.Contains(t.cookies, Cookie(n)) }); i >= 0 {
		t.found = list[i : i+1]
		return "", nil
	}
	pod := t.find(list)
	if len(pod.Namespaces) == 0 {
		if t.gone {
			return "", nil
		}
		t.gone = true
		return fmt.Sprintf("%s %s is gone: drops in it are followed again when there is another of that name", t.flag, t.name), nil
	}
	namespaces, pods := pod.Namespaces, []Pod(nil)
	if t.flag == "--pod" {
		namespaces, pods = nil, []Pod{pod}
	}
	cookies, err := watch(namespaces, pods)
	if err != nil || len(cookies) == 0 {
		return "", err // it was deleted again
	}
	t.found, t.cookies, t.gone = pod.Namespaces, cookies, false
	line := fmt.Sprintf("%s %s is another network namespace now: following it", t.flag, t.name)
	if pods != nil && !slices.Equal(pod.Addresses, t.addresses) {
		line += fmt.Sprintf("; its address was %v and is %v: start anew to see what others drop of it", t.addresses, pod.Addresses)
	}
	return line, nil
}

// find returns the namespaces that have its name now. A process id names no other process.
func (t *Target) find(list []conntrack.Namespace) (pod Pod) {
	if _, err := strconv.Atoi(t.name); err == nil {
		return pod
	}
	if t.flag == "--pod" {
		pod, _ = FindPod(t.name, list) // an error: no pod has
		return pod
	}
	i := slices.IndexFunc(list, func(n conntrack.Namespace) bool { return n.Is(t.name) })
	if i >= 0 {
		pod.Namespaces = list[i : i+1]
	}
	return pod
}
