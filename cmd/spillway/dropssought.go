package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/node/conntrack"
)

// sought is what --netns or --pod named: another network namespace may come into
// its place while drops are followed.
type sought struct {
	flag, name string
	found      []conntrack.Namespace
	cookies    []uint64
	addresses  []netip.Addr // of a pod
	gone       bool
}

// lookAfter is how often it is looked whether what is sought is still there.
const lookAfter = time.Second

// soughtBy are those of a command line, as config found them.
func (c *dropsConfig) soughtBy(config *drops.Config) (all []*sought) {
	for _, name := range c.netns {
		i := slices.IndexFunc(config.Namespaces, func(n conntrack.Namespace) bool { return n.Is(name) })
		if i >= 0 && !config.Namespaces[i].Own {
			all = append(all, newSought("--netns", name, config.Namespaces[i:i+1], nil))
		}
	}
	for _, p := range config.Pods {
		if _, err := netip.ParseAddr(p.Name); err != nil { // an address goes on being followed
			all = append(all, newSought("--pod", p.Name, p.Namespaces, p.Addresses))
		}
	}
	return all
}

func newSought(flag, name string, found []conntrack.Namespace, addresses []netip.Addr) *sought {
	s := &sought{flag: flag, name: name, found: found, addresses: addresses}
	for _, n := range found {
		s.cookies = append(s.cookies, drops.Cookie(n))
	}
	return s
}

// there reports whether one of its namespaces lives, where it was found.
func (s *sought) there() bool {
	return slices.ContainsFunc(s.found, func(n conntrack.Namespace) bool {
		cookie := drops.Cookie(n)
		return cookie != 0 && slices.Contains(s.cookies, cookie)
	})
}

// again looks for it anew, watches what has come into its place, and says so in a
// line; "" if there is nothing to say.
func (s *sought) again(list []conntrack.Namespace, watch func([]conntrack.Namespace, []drops.Pod) ([]uint64, error)) (string, error) {
	// Its first process has ended, or its name was taken off, and it is there.
	if i := slices.IndexFunc(list, func(n conntrack.Namespace) bool { return slices.Contains(s.cookies, drops.Cookie(n)) }); i >= 0 {
		s.found = list[i : i+1]
		return "", nil
	}
	pod := s.find(list)
	if len(pod.Namespaces) == 0 {
		if s.gone {
			return "", nil
		}
		s.gone = true
		return fmt.Sprintf("%s %s is gone: drops in it are followed again when there is another of that name", s.flag, s.name), nil
	}
	namespaces, pods := pod.Namespaces, []drops.Pod(nil)
	if s.flag == "--pod" {
		namespaces, pods = nil, []drops.Pod{pod}
	}
	cookies, err := watch(namespaces, pods)
	if err != nil || len(cookies) == 0 {
		return "", err // gone again
	}
	s.found, s.cookies, s.gone = pod.Namespaces, cookies, false
	line := fmt.Sprintf("%s %s is another network namespace now: following it", s.flag, s.name)
	if pods != nil && !slices.Equal(pod.Addresses, s.addresses) {
		line += fmt.Sprintf("; its address was %v and is %v: start anew to see what others drop of it", s.addresses, pod.Addresses)
	}
	return line, nil
}

// find finds what has its name now. A process id names nothing but that process.
func (s *sought) find(list []conntrack.Namespace) (pod drops.Pod) {
	if _, err := strconv.Atoi(s.name); err == nil {
		return pod
	}
	if s.flag == "--pod" {
		pod, _ = drops.FindPod(s.name, list) // an error: nothing has
		return pod
	}
	i := slices.IndexFunc(list, func(n conntrack.Namespace) bool { return n.Is(s.name) })
	if i >= 0 {
		pod.Namespaces = list[i : i+1]
	}
	return pod
}
