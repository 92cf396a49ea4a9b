package intent

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// With Config.HostPorts, the host ports of a Pod of this node are served as the NodePorts of a
// Service that has one endpoint, the Pod, and externalTrafficPolicy Local: clients keep their
// address. Its name is that of model.HostPortsOf. A Service that wants the same port gets it.

// maxHostPortName bounds the names of Pods as those of Services are (RFC 1123): dataplanes write
// them into comments, of 255 bytes at most, and the kernel refuses all of a change with a longer one.
// Names that a controller makes have no more characters.
const maxHostPortName = 63

// hostPorts is what the host ports of a Pod are in terms of Services.
type hostPorts struct {
	spec   *model.Service
	plan   plan
	slices []*store.Slice // one for each family
}

// onHostPorts updates the host ports of a Pod.
func (t *Tracker) onHostPorts(name model.Name, before, now *model.Pod) {
	if !t.cfg.HostPorts || before != nil && now != nil && before.Node == now.Node &&
		slices.Equal(before.IPs, now.IPs) && slices.Equal(before.HostPorts, now.HostPorts) {
		return
	}
	h := t.hostPortsOf(now)
	service := model.HostPortsOf(name)
	e := t.services[service]
	if h == nil && (e == nil || e.spec == nil) {
		return
	}
	if h == nil {
		t.replan(e, nil, plan{})
		e.demand = demand{}
		delete(t.podsWithHostPorts, e)
		return
	}
	e = t.serviceNamed(service)
	t.replan(e, h.spec, h.plan)
	e.demand = demand{ports: len(h.plan.ports), entries: entries{frontendEntries: len(h.plan.ports)}}
	t.podsWithHostPorts[e] = h.slices
}

// hostPortsOf returns nil for a Pod without host ports on this node, or without an address.
func (t *Tracker) hostPortsOf(p *model.Pod) *hostPorts {
	if p == nil || t.cfg.NodeName == "" || p.Node != t.cfg.NodeName || len(p.HostPorts) == 0 || len(p.IPs) == 0 {
		return nil
	}
	service := model.HostPortsOf(p.Name)
	h := &hostPorts{spec: &model.Service{Name: service, Type: model.HostPorts, ExternalLocal: true}}
	for _, a := range p.IPs {
		f := model.FamilyOf(a.Unmap())
		if !slices.ContainsFunc(h.slices, func(s *store.Slice) bool { return s.Object.Family == f }) {
			h.slices = append(h.slices, hostPortSlice(p, service, a.Unmap()))
		}
	}
	if len(p.Name.Name) > maxHostPortName {
		h.plan.problems = append(h.plan.problems, model.ServiceProblem(service, "metadata.name",
			fmt.Sprintf("has more than %d characters, and its host ports are not served; use a shorter name", maxHostPortName)))
		return h
	}
	known := map[PortID]bool{}
	for _, port := range p.HostPorts {
		for _, s := range h.slices {
			id := PortID{Service: service, Port: strconv.Itoa(int(port.Host)), Number: port.Host, Protocol: port.Protocol, Family: s.Object.Family}
			if port.IP.IsValid() && !port.IP.IsUnspecified() && model.FamilyOf(port.IP) != id.Family {
				continue
			}
			if known[id] {
				h.plan.problems = append(h.plan.problems, model.ServiceProblem(service, hostPortField(port.Host, port.Protocol),
					"repeats an earlier port; remove one of the two"))
				break
			}
			known[id] = true
			s.Object.Ports = append(s.Object.Ports, model.EndpointPort{Name: id.Port, Protocol: port.Protocol, Port: port.Port})
			h.plan.ports = append(h.plan.ports, portPlan{id: id, requests: []addressRequest{hostPortRequest(port, id)}})
		}
	}
	slices.SortFunc(h.plan.ports, func(a, b portPlan) int { return a.id.Compare(b.id) })
	return h
}

// hostPortRequest asks for all of the node's addresses, or for the one that the Pod names.
func hostPortRequest(port model.HostPort, id PortID) addressRequest {
	key := addressKey{Port: port.Host, Protocol: port.Protocol}
	if !port.IP.IsValid() || port.IP.IsUnspecified() {
		key.Family = id.Family
		return addressRequest{key: key, kind: NodePort, ofPod: true}
	}
	key.Addr = port.IP
	return addressRequest{key: key, kind: ExternalIP, ofPod: true}
}

// hostPortSlice has the Pod's address, and no port yet.
func hostPortSlice(p *model.Pod, service model.Name, addr netip.Addr) *store.Slice {
	s := &model.EndpointSlice{
		Name: model.Name{Namespace: service.Namespace, Name: fmt.Sprintf("%s-%s", service.Name, model.FamilyOf(addr))}, Service: service,
		Family:    model.FamilyOf(addr),
		Endpoints: []model.Endpoint{{Addr: addr, Node: p.Node, Pod: p.Name, Ready: true, Serving: true}},
	}
	return &store.Slice{Object: s, MayBeOnNode: true}
}

func hostPortField(port uint16, protocol model.Protocol) string {
	return fmt.Sprintf("hostPort %d/%s", port, protocol)
}

// hostPortConflicts returns the Problems of a host port that no Service has. It is not served
// on a port that keeps the node in the cluster, or at an address that is not the node's own:
// any author of a Pod can name any.
func (t *Tracker) hostPortConflicts(e *service, c addressRequest) (out []model.Problem, served bool) {
	addrs := []netip.Addr{c.key.Addr}
	if !c.key.Addr.IsValid() {
		addrs = t.own.addrs
	} else if !t.own.has(c.key.Addr) {
		return []model.Problem{model.ServiceProblem(e.name, c.field(),
				fmt.Sprintf("hostIP %s is not an address of this node, and is not served; use one that other machines reach, or none", c.key.Addr))},
			false
	}
	if owner := t.nodePortOwner(c.key); owner != (PortID{}) {
		return []model.Problem{conflict(e.name, c, owner)}, false
	}
	for _, a := range addrs {
		if !c.key.Addr.IsValid() && model.FamilyOf(a) != c.key.Family {
			continue
		}
		at := c
		at.key.Addr, at.key.Family = a, 0
		if what, ok := t.reservedConflict(at); what != "" {
			return []model.Problem{model.ServiceProblem(e.name, c.field(), what)}, ok
		}
	}
	return nil, true
}

// nodePortOwner returns the Service that has the port of a host port as a NodePort or
// healthCheckNodePort; the zero PortID for none. Its key is another one if the host port has a
// hostIP, or if it is a healthCheckNodePort, and dataplanes would find that of the host port first.
func (t *Tracker) nodePortOwner(k addressKey) PortID {
	if k.Addr.IsValid() && !t.servesNodePorts(k.Addr) {
		return PortID{}
	}
	for _, wide := range nodePortsAt(k) {
		if list := t.addresses.requesters[wide]; len(list) > 0 && !list[0].ofPod() {
			return list[0].id()
		}
	}
	return PortID{}
}

// appendHeld adds a request that is served. Where NodePorts are served on loopback, a host port
// of all the node's addresses becomes one of each of them, because the author of a Pod must not
// get what the node's own programs serve to each other there, such as 127.0.0.1:10257 of
// kube-controller-manager. It leaves out addresses where a Service has the port.
func (t *Tracker) appendHeld(held []addressRequest, c addressRequest) []addressRequest {
	if !c.ofPod || c.key.Addr.IsValid() || !slices.Contains(t.cfg.LoopbackNodePorts(), c.key.Family) {
		return append(held, c)
	}
	for _, a := range t.own.addrs {
		key := addressKey{Addr: a, Protocol: c.key.Protocol, Port: c.key.Port}
		if model.FamilyOf(a) == c.key.Family && t.servesNodePorts(a) && t.addresses.owner(key) == (PortID{}) {
			held = append(held, addressRequest{key: key, kind: ExternalIP, ofPod: true})
		}
	}
	return held
}

// markHostPortDirty marks the Pods dirty that have an address and port, or a healthCheckNodePort, as
// a host port of all the node's addresses.
func (t *Tracker) markHostPortDirty(k addressKey) {
	if !t.cfg.HostPorts || k.Family != 0 || k.Addr.IsValid() && !t.own.has(k.Addr) {
		return
	}
	for _, wide := range hostPortsAt(k) {
		for _, c := range t.addresses.requesters[wide] {
			if c.ofPod() {
				t.markDirty(c.service)
			}
		}
	}
}

// hostPortsAt lists the keys of host ports that an address and port, or a healthCheckNodePort, hides.
func hostPortsAt(k addressKey) []addressKey {
	if k.Addr.IsValid() {
		return []addressKey{{Family: model.FamilyOf(k.Addr), Protocol: k.Protocol, Port: k.Port}}
	}
	return []addressKey{{Family: model.IPv4, Protocol: model.TCP, Port: k.Port}, {Family: model.IPv6, Protocol: model.TCP, Port: k.Port}}
}

// markHostPortsDirty makes Changes decide all host ports again.
func (t *Tracker) markHostPortsDirty() {
	for e := range t.podsWithHostPorts {
		t.markDirty(e)
	}
}
