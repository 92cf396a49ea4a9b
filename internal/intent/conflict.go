package intent

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/model"
)

// claimKey is what only one Service port can have. An address frontend has
// Addr; a NodePort has Family instead; a healthCheckNodePort has only Port.
type claimKey struct {
	Addr     netip.Addr
	Family   model.Family
	Protocol model.Protocol
	Port     uint16
}

// String names the claim as a person would: "10.96.0.1:80/TCP".
func (k claimKey) String() string {
	switch {
	case k.Addr.IsValid():
		return fmt.Sprintf("%s/%s", netip.AddrPortFrom(k.Addr, k.Port), k.Protocol)
	case k.Family != 0:
		return fmt.Sprintf("NodePort %d/%s (%s)", k.Port, k.Protocol, k.Family)
	}
	return fmt.Sprintf("healthCheckNodePort %d", k.Port)
}

// claimant is one Service port (or, for a healthCheckNodePort, a Service) that
// asks for a claimKey.
type claimant struct {
	id      PortID
	kind    FrontendKind
	created time.Time
}

// compareClaimants puts the winner first: the older Service, then the first by
// name. A clusterIP comes before all else, because the API server hands each
// out once, whereas anybody who may write a Service can name any externalIP
// (CVE-2020-8554).
func compareClaimants(a, b claimant) int {
	return cmp.Or(
		trueFirst(a.kind == ClusterIP, b.kind == ClusterIP),
		a.created.Compare(b.created),
		a.id.Compare(b.id),
	)
}

// claimTable holds all claims, the claimants of each in the order in which they
// get it.
type claimTable map[claimKey][]claimant

func (t claimTable) add(key claimKey, c claimant) {
	list := t[key]
	at, _ := slices.BinarySearchFunc(list, c, compareClaimants)
	t[key] = slices.Insert(list, at, c)
}

func (t claimTable) remove(key claimKey, id PortID) {
	list := slices.DeleteFunc(t[key], func(c claimant) bool { return c.id == id })
	if len(list) == 0 {
		delete(t, key)
		return
	}
	t[key] = list
}

// holder returns who has the claim; there is none only if nobody asked.
func (t claimTable) holder(key claimKey) PortID {
	if list := t[key]; len(list) > 0 {
		return list[0].id
	}
	return PortID{}
}

// conflict words the Problem of a Service that did not get what it claims.
func conflict(loser model.Name, c claim, holder PortID) model.Problem {
	what := fmt.Sprintf("%s is already taken by Service %s; change one of the two", c.key, holder.Service)
	if holder.Service == loser {
		what = fmt.Sprintf("%s is already taken by port %s of the same Service; change one of the two",
			c.key, portName(holder))
	}
	return model.Problem{Where: "Service " + loser.String(), Field: c.field, What: what}
}

func portName(id PortID) string {
	if id.Port != "" {
		return fmt.Sprintf("%q", id.Port)
	}
	return fmt.Sprintf("%d/%s", id.Number, id.Protocol)
}
