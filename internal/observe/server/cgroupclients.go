package server

import (
	"fmt"
	"strings"

	"spillway.dev/spillway/internal/node/kernel"
)

// mostCgroups limits the names in memory: to find one, the tree of cgroups is read.
const mostCgroups = 1000

// cgroupClients names clients by the cgroup of their process. Only s.examining uses it.
type cgroupClients struct {
	names map[uint64]string
	find  func(id uint64) (path string) // nil: the node's cgroups
}

// name names the client in a cgroup for people. A cgroup that is gone has no name.
func (c *cgroupClients) name(id uint64) string {
	if name, known := c.names[id]; known {
		return name
	}
	if c.names == nil || len(c.names) >= mostCgroups {
		c.names = map[uint64]string{}
	}
	find := c.find
	if find == nil {
		find = findCgroup
	}
	c.names[id] = clientAt(find(id), id)
	return c.names[id]
}

func findCgroup(id uint64) string {
	tree := kernel.FindCgroupTree()
	return strings.TrimPrefix(tree.ByID(id), tree.Top)
}

// clientAt names the client in a cgroup. What a container names its own cgroups does not count, so the
// first part that is the name of a Pod's cgroup does.
func clientAt(path string, id uint64) string {
	if path == "" {
		return fmt.Sprintf("a process of this node or of its pods, which has ended (cgroup %d)", id)
	}
	for part := range strings.SplitSeq(path, "/") {
		if uid, ok := kernel.PodUID(part); ok {
			return "a process of the pod with the uid " + uid
		}
	}
	return "a process in the cgroup " + path
}
