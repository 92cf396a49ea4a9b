package intent

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"

	"spillway.dev/spillway/internal/facts/model"
)

// OutlierEjectionAnnotation says that endpoints which do not accept connections get no new
// ones for a while: true or false.
const OutlierEjectionAnnotation = "spillway.dev/outlier-ejection"

// Failing is an endpoint of a port with outlier ejection, and why it must be ejected.
type Failing struct {
	Endpoint netip.AddrPort
	Why      string
}

// ejectsOutliers reads OutlierEjectionAnnotation.
func (c *Config) ejectsOutliers(svc *model.Service, complain func(field, what string)) bool {
	text, set := svc.Annotations[OutlierEjectionAnnotation]
	if !set {
		return false
	}
	on, err := strconv.ParseBool(text)
	if err != nil {
		complain(annotationField(OutlierEjectionAnnotation), fmt.Sprintf("%q is neither true nor false, and no endpoint is ejected", text))
	}
	if on && !c.OutlierEjection {
		complain(annotationField(OutlierEjectionAnnotation),
			"has no effect on this node: its agent needs --outlier-ejection, and --proxy-mode ebpf or nftables")
	}
	return on && c.OutlierEjection
}

// SetFailing sets the failing endpoints of all ports, complete each time; those that fail
// longest are in front.
func (t *Tracker) SetFailing(failing map[PortID][]Failing) {
	for id := range failing {
		if !slices.Equal(failing[id], t.failing[id]) {
			t.markDirtyNamed(id.Service)
		}
	}
	for id := range t.failing {
		if _, still := failing[id]; !still {
			t.markDirtyNamed(id.Service)
		}
	}
	t.failing = maps.Clone(failing)
}

// markDirtyNamed is markDirty for a Service that may have been deleted.
func (t *Tracker) markDirtyNamed(name model.Name) {
	if e := t.services[name]; e != nil {
		t.markDirty(e)
	}
}

// Watching reports whether any port has outlier ejection.
func (t *Tracker) Watching() bool { return len(t.watched) > 0 }

// Ejected returns the number of ejected endpoints.
func (t *Tracker) Ejected() (n int) {
	for id := range t.failing {
		e := t.services[id.Service]
		if e == nil {
			continue
		}
		for _, p := range e.ports {
			if p.ID != id {
				continue
			}
			for i := range p.Endpoints {
				if p.Endpoints[i].Ejected {
					n++
				}
			}
		}
	}
	return n
}

// noteWatched records whether a decided Service has outlier ejection.
func (t *Tracker) noteWatched(e *service) {
	if e.spec != nil && e.plan.eject {
		t.watched[e] = struct{}{}
	} else {
		delete(t.watched, e)
	}
}

// eject marks the failing endpoints of a port. Half of the endpoints remain in use: all may
// fail because of this node, or of a client that a policy denies.
func (t *Tracker) eject(e *service, sp *ServicePort) (problems []model.Problem) {
	if !e.plan.eject || sp.ID.Protocol != model.TCP {
		return nil
	}
	for i := range sp.Endpoints {
		sp.Endpoints[i].Watched = true
	}
	spare := len(sp.Endpoints) / 2
	for _, f := range t.failing[sp.ID] {
		i, found := slices.BinarySearchFunc(sp.Endpoints, f.Endpoint, func(e Endpoint, a netip.AddrPort) int { return e.Addr.Compare(a) })
		if !found {
			continue
		}
		what := "still gets new connections, because half of the endpoints are left out already"
		if spare > 0 {
			spare--
			sp.Endpoints[i].Ejected = true
			what = "gets no new connections for a while"
		}
		problems = append(problems, model.ServiceProblem(e.name, "", fmt.Sprintf("endpoint %s %s: %s", f.Endpoint, what, f.Why)))
	}
	return problems
}
