package flows

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"
)

// Plan resolves short names to the addresses of a cluster.
type Plan interface {
	Addr(host string, v6 bool) netip.Addr
	NodeName(host string) string // the node it is or runs on, "" for a client
	Zone(host string) string
	// External returns the i-th address that clients route to a node.
	External(node string, i int, v6 bool) netip.Addr
}

// The ranges that cases take their Service addresses from. The ports beyond
// lastNodePort are not used, so that a test may claim one by hand.
const (
	firstNodePort   = 30000
	lastNodePort    = 32499
	firstHealthPort = 32500
)

var (
	clusterIPs4 = netip.MustParsePrefix("10.96.0.0/16")
	clusterIPs6 = netip.MustParsePrefix("fd96::/112")
)

// ServiceRanges are the ranges of the cluster IPs; an outside client reaches
// them only if it has a route there.
func ServiceRanges() []netip.Prefix { return []netip.Prefix{clusterIPs4, clusterIPs6} }

// Numbers hands out addresses and ports: each case of a suite gets its own.
type Numbers struct {
	clusterIP, nodePort, external, healthPort int
}

// Scope is what one case has got: a namespace, addresses and ports. They stay
// the same over the steps of the case.
type Scope struct {
	Namespace string

	plan      Plan
	numbers   *Numbers
	clusterIP map[string]int
	nodePort  map[string]int
	external  map[string]int
	health    map[string]int
}

// NewScope makes the scope of a case.
func NewScope(namespace string, plan Plan, numbers *Numbers) *Scope {
	return &Scope{
		Namespace: namespace, plan: plan, numbers: numbers,
		clusterIP: map[string]int{}, nodePort: map[string]int{},
		external: map[string]int{}, health: map[string]int{},
	}
}

// take returns the number that a key has, or gives it the next one.
func take(have map[string]int, key string, next *int) int {
	n, ok := have[key]
	if !ok {
		n = *next
		*next++
		have[key] = n
	}
	return n
}

// add returns the address n places behind another.
func add(a netip.Addr, n int) netip.Addr {
	b := a.AsSlice()
	for i := len(b) - 1; n > 0; i-- {
		n += int(b[i])
		b[i] = byte(n)
		n >>= 8
	}
	sum, _ := netip.AddrFromSlice(b)
	return sum
}

// ClusterIP is the cluster IP of a Service.
func (s *Scope) ClusterIP(service string, v6 bool) netip.Addr {
	n := take(s.clusterIP, service, &s.numbers.clusterIP) + 10 // .1 is the API server's own
	if v6 {
		return add(clusterIPs6.Addr(), n)
	}
	return add(clusterIPs4.Addr(), n)
}

// NodePort is the NodePort of a Service's port.
func (s *Scope) NodePort(service, port string) int {
	n := firstNodePort + take(s.nodePort, service+"/"+port, &s.numbers.nodePort)
	if n > lastNodePort {
		panic(fmt.Sprintf("no NodePort is left for %s of %s", service, s.Namespace))
	}
	return n
}

// ExternalIP is the external or load balancer address of a Service that clients
// route to a node.
func (s *Scope) ExternalIP(service, node string, v6 bool) netip.Addr {
	return s.plan.External(node, take(s.external, service, &s.numbers.external), v6)
}

func (s *Scope) healthCheckPort(service string) int {
	return firstHealthPort + take(s.health, service, &s.numbers.healthPort)
}

// YAML renders objects as one manifest file.
func (s *Scope) YAML(objects []Object) ([]byte, error) {
	var file bytes.Buffer
	for _, o := range s.Objects(objects) {
		doc, err := yaml.Marshal(o)
		if err != nil {
			return nil, fmt.Errorf("render manifest: %w", err)
		}
		file.WriteString("---\n")
		file.Write(doc)
	}
	return file.Bytes(), nil
}

// Objects are the Kubernetes objects that a case's objects stand for.
func (s *Scope) Objects(objects []Object) []runtime.Object {
	var list []runtime.Object
	for _, o := range objects {
		list = append(list, o.manifests(s)...)
	}
	return list
}

// Address resolves a target of a case. services are the Services of the current step.
func (s *Scope) Address(t Target, services []Service, c Combo) (netip.AddrPort, error) {
	if t.Kind == ToAddress {
		return netip.AddrPortFrom(s.plan.Addr(nodeAddr(t), c.IPv6()), uint16(t.Number)), nil
	}
	svc, err := pickService(t, services)
	if err != nil {
		return netip.AddrPort{}, err
	}
	port, err := pickPort(t, svc, c)
	if err != nil {
		return netip.AddrPort{}, err
	}
	owner := svc.name()
	switch t.Kind {
	case ToClusterIP:
		if svc.ShareIP != "" {
			owner = svc.ShareIP
		}
		return netip.AddrPortFrom(s.ClusterIP(owner, c.IPv6()), uint16(port.Port)), nil
	case ToNodePort:
		if svc.SharePort != "" {
			owner = svc.SharePort
		}
		return netip.AddrPortFrom(s.plan.Addr(nodeAddr(t), c.IPv6()), uint16(s.NodePort(owner, port.Name))), nil
	case ToHealthCheck:
		return netip.AddrPortFrom(s.plan.Addr(nodeAddr(t), c.IPv6()), uint16(s.healthCheckPort(owner))), nil
	case ToExternalIP, ToLoadBalancer:
		return netip.AddrPortFrom(s.ExternalIP(cmp.Or(svc.ShareVia, owner), t.Node, c.IPv6()), uint16(port.Port)), nil
	}
	return netip.AddrPort{}, fmt.Errorf("resolve target: unknown kind %q", t.Kind)
}

// nodeAddr is the short name of the host address a target means: "a",
// "a/bridge" or "a/loopback".
func nodeAddr(t Target) string {
	if t.Addr != "" {
		return t.Node + "/" + t.Addr
	}
	return t.Node
}

func pickService(t Target, services []Service) (Service, error) {
	for _, s := range services {
		if t.Service == "" || t.Service == s.name() {
			return s, nil
		}
	}
	return Service{}, fmt.Errorf("resolve target: the case has no Service %q", t.Service)
}

func pickPort(t Target, s Service, c Combo) (Port, error) {
	want := corev1.ProtocolTCP
	if c.Protocol() == "udp" {
		want = corev1.ProtocolUDP
	}
	for _, p := range s.ports() {
		if p.Protocol == want && (t.Port == "" || t.Port == p.Name) {
			return p, nil
		}
	}
	return Port{}, fmt.Errorf("resolve target: Service %q has no port %q of protocol %s", s.name(), t.Port, want)
}

// Combos are the combinations that a flow is asked for while objects are there.
func (f Flow) Combos(objects []Object) []Combo {
	var list []Combo
	for _, c := range AllCombos {
		switch {
		case f.Only != nil && !slices.Contains(f.Only, c):
		case (f.Unconnected || f.SameSocket) && c.Protocol() != "udp":
		case f.Mapped && c.IPv6():
		case f.To.Kind == ToHealthCheck && c.Protocol() != "tcp":
		case !serves(ServicesOf(objects), f.To, c):
		default:
			list = append(list, c)
		}
	}
	return list
}

// ServicesOf are the Services among objects.
func ServicesOf(objects []Object) []Service {
	var services []Service
	for _, o := range objects {
		if s, ok := o.(Service); ok {
			services = append(services, s)
		}
	}
	return services
}

// serves tells whether a target exists for a combination: the Service has the
// family and a port of the protocol.
func serves(services []Service, t Target, c Combo) bool {
	if t.Kind == ToAddress {
		return true
	}
	s, err := pickService(t, services)
	if err != nil || !slices.Contains(s.families(), c.IPv6()) {
		return false
	}
	_, err = pickPort(t, s, c)
	return err == nil || t.Kind == ToHealthCheck
}
