package kubeobject

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"spillway.dev/spillway/internal/facts/model"
)

// junk is possible text of a hostile name or value.
const junk = "a\nlevel=ERROR msg=forged \x1b[2J\xff\u2028b"

func hostileMeta() metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: junk, Namespace: junk, UID: junk,
		Labels: map[string]string{junk: junk, discoveryv1.LabelServiceName: junk},
		Annotations: map[string]string{junk: junk, corev1.EndpointsLastChangeTriggerTime: junk, sourceRangesAnnotation: junk,
			model.AnnotationPrefix + junk: junk}}
}

func ptr[T any](v T) *T { return &v }

// TestNoObjectBreaksALine converts objects whose every text is hostile: nothing panics,
// and each report is one line of bounded length.
func TestNoObjectBreaksALine(t *testing.T) {
	long := strings.Repeat(junk, 5000)
	for _, text := range []string{junk, long, "", "\x00", "Infinity", "NaN"} {
		m := hostileMeta()
		m.Name = text
		ref := &corev1.ObjectReference{Kind: "Pod", Name: text, Namespace: text}
		_, service := Service(&corev1.Service{ObjectMeta: m, Spec: corev1.ServiceSpec{
			Type: "LoadBalancer", ClusterIP: text, ClusterIPs: []string{text, text}, ExternalIPs: []string{text},
			LoadBalancerSourceRanges: []string{text},
			SessionAffinity:          corev1.ServiceAffinity(text), ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicy(text),
			IPFamilies:          []corev1.IPFamily{corev1.IPFamily(text)},
			TrafficDistribution: &text, Ports: []corev1.ServicePort{{Name: text, Protocol: corev1.Protocol(text), Port: -1, NodePort: 1 << 30}, {}}},
			Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: text,
				IPMode: ptr(corev1.LoadBalancerIPMode(text))}}}}})
		_, slice := EndpointSlice(&discoveryv1.EndpointSlice{ObjectMeta: m, AddressType: "IPv4",
			Ports: []discoveryv1.EndpointPort{{Name: &text, Protocol: ptr(corev1.Protocol(text)), Port: ptr(int32(-1))}, {}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{text}, NodeName: &text, Zone: &text, TargetRef: ref,
				Hints: &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: text}}}}, {}}})
		_, node := Node(&corev1.Node{ObjectMeta: m, Spec: corev1.NodeSpec{PodCIDR: text, PodCIDRs: []string{text, text},
			Taints: []corev1.Taint{{Key: text}}},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: "InternalIP", Address: text}, {Type: "ExternalIP", Address: text}}}})
		_, pod := Pod(&corev1.Pod{ObjectMeta: m, Status: corev1.PodStatus{PodIP: text, PodIPs: []corev1.PodIP{{IP: text}}}})
		_, policy := NetworkPolicy(&networkingv1.NetworkPolicy{ObjectMeta: m,
			Spec: networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyType(text)},
				PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{text: text},
					MatchExpressions: []metav1.LabelSelectorRequirement{{Key: text, Operator: metav1.LabelSelectorOperator(text),
						Values: []string{text}}}}}})
		_, space := Namespace(&corev1.Namespace{ObjectMeta: m})
		for kind, problems := range map[string][]model.Problem{"Service": service, "EndpointSlice": slice, "Node": node, "Pod": pod,
			"NetworkPolicy": policy, "Namespace": space} {
			if len(problems) == 0 {
				t.Errorf("%s %.20q: no problem", kind, text)
			}
			for _, p := range problems {
				if s := p.String(); strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\u2028' }) ||
					strings.ToValidUTF8(s, "?") != s || len(s) > 4000 {
					t.Errorf("%s %.20q: not one short line: %d bytes, %.300q", kind, text, len(s), s)
				}
			}
		}
	}
}

// TestTheSizeOfOneObjectIsBounded checks the size of an object in the node's tables, and
// of the reports about it.
func TestTheSizeOfOneObjectIsBounded(t *testing.T) {
	service := func(ports, external, ranges int) (*model.Service, []model.Problem) {
		o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: corev1.ServiceSpec{Type: "LoadBalancer", ClusterIP: "10.96.0.1"}}
		for i := range ports {
			o.Spec.Ports = append(o.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(i + 1)})
		}
		for i := range external {
			o.Spec.ExternalIPs = append(o.Spec.ExternalIPs, netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}).String())
		}
		for i := range ranges {
			o.Spec.LoadBalancerSourceRanges = append(o.Spec.LoadBalancerSourceRanges,
				netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 32).String())
		}
		return Service(o)
	}
	for _, row := range []struct {
		ports, external, ranges int
		want                    string
	}{
		{20000, 1, 3, ""},
		{64, 1022, 1024, ""},
		{64, 1023, 0, "Service default/a: spec: asks for 65600 frontends (64 ports on 1025 addresses); the maximum is 65536; split it into " +
			"several Services"},
		{64, 0, 1025, "Service default/a: spec.loadBalancerSourceRanges: has 1025 entries; the maximum is 1024 for 64 ports; split it into " +
			"several Services"},
		{5000, 20000, 20000, "Service default/a: spec: asks for 100010000 frontends"},
	} {
		s, problems := service(row.ports, row.external, row.ranges)
		got := ""
		if len(problems) > 0 {
			got = problems[0].String()
		}
		if (s == nil) != (row.want != "") || !strings.HasPrefix(got, row.want) || row.want == "" && got != "" {
			t.Errorf("%d ports, %d addresses, %d ranges: %q, want %q", row.ports, row.external, row.ranges, got, row.want)
		}
	}

	o := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: map[string]string{discoveryv1.LabelServiceName: "w"}},
		AddressType: "IPv4"}
	for range maxEndpoints + 1 {
		o.Endpoints = append(o.Endpoints, discoveryv1.Endpoint{Addresses: []string{"x"}})
	}
	es, problems := EndpointSlice(o)
	verify(t, es, problems, nil, "endpoints: has 16385 entries; the maximum is 16384")
	o.Endpoints = o.Endpoints[:1000]
	es, problems = EndpointSlice(o)
	verify(t, es, problems, &model.EndpointSlice{Name: model.Name{Namespace: "default", Name: "a"},
		Service: model.Name{Namespace: "default", Name: "w"}, Family: model.IPv4},
		`endpoints: 1 address gets no traffic: "x" is not an IP address; correct`)
	o.Endpoints = make([]discoveryv1.Endpoint, 1000)
	if es, problems = EndpointSlice(o); len(problems) != maxProblems+1 ||
		problems[maxProblems].String() != "EndpointSlice default/a: has more problems than these 16; fix these first" {
		t.Errorf("%v, %d problems, the last %v", es, len(problems), problems[len(problems)-1])
	}
	o.Endpoints = []discoveryv1.Endpoint{{}}
	for range maxAddresses + 1 {
		o.Endpoints[0].Addresses = append(o.Endpoints[0].Addresses, "10.0.0.1")
	}
	es, problems = EndpointSlice(o)
	if len(es.Endpoints) != 0 || len(problems) != 1 || problems[0].What != "the endpoint is left out: has 101 entries; the maximum is 100" {
		t.Errorf("%v, problems %v", es, problems)
	}
	o.Endpoints = nil
	for i := range maxEndpointPorts + 1 {
		o.Ports = append(o.Ports, discoveryv1.EndpointPort{Name: ptr(fmt.Sprint("p", i)), Port: ptr(int32(i%65535 + 1))})
	}
	es, problems = EndpointSlice(o)
	verify(t, es, problems, nil, "ports: has 20001 entries; the maximum is 20000")
}

func TestOnlyOwnAnnotationsAreKept(t *testing.T) {
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "a",
		Annotations: map[string]string{"other": strings.Repeat("x", 1<<18), model.AnnotationPrefix + "helper": strings.Repeat("y", 1<<18)}},
		Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Port: 1}}}}
	s, problems := Service(o)
	if len(problems) > 0 || len(s.Annotations) != 1 || len(s.Annotations[model.AnnotationPrefix+"helper"]) > 1000 {
		t.Errorf("%d annotations, problems %v", len(s.Annotations), problems)
	}
	for i := range 1000 {
		o.Annotations[model.AnnotationPrefix+strconv.Itoa(i)] = "z"
	}
	s, problems = Service(o)
	if len(problems) != 1 || !strings.Contains(problems[0].What, "1001 names") || len(s.Annotations) != maxOwnAnnotations {
		t.Errorf("%d annotations are kept, problems %v", len(s.Annotations), problems)
	}
}

// TestSpecialAddresses has an endpoint, a clusterIP and an externalIP at addresses with a
// different meaning on each machine. The API server refuses them as endpoints too, except
// multicast beyond the link.
func TestSpecialAddresses(t *testing.T) {
	for _, a := range []string{"127.0.0.1", "127.8.9.1", "::1", "0.0.0.0", "::", "169.254.169.254", "fe80::1", "224.0.0.1", "239.1.2.3",
		"ff02::1", "ff0e::1", "255.255.255.255",
		"::ffff:127.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "127.1", "0x7f000001", "2130706433", "0127.0.0.1", " 10.0.0.1", "10.0.0.1\n"} {
		kind := discoveryv1.AddressTypeIPv4
		if strings.Contains(a, ":") {
			kind = discoveryv1.AddressTypeIPv6
		}
		o := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: map[string]string{discoveryv1.LabelServiceName: "w"}},
			AddressType: kind,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{a}}}}
		if s, problems := EndpointSlice(o); s == nil || len(s.Endpoints) > 0 || len(problems) != 1 || problems[0].Field != "endpoints" {
			t.Errorf("endpoint %q: %v, %v", a, s, problems)
		}
		svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "a"},
			Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", ExternalIPs: []string{a}, Ports: []corev1.ServicePort{{Port: 1}}}}
		if s, problems := Service(svc); s != nil || len(problems) != 1 {
			t.Errorf("externalIP %q: %v, %v", a, s, problems)
		}
	}
}

// TestANodeCannotTakeAddressesOfOthers: a kubelet writes its own Node, and all nodes
// trust the ranges and addresses in it.
func TestANodeCannotTakeAddressesOfOthers(t *testing.T) {
	n, problems := Node(object[corev1.Node](t, `{metadata: {name: a}, spec: {podCIDRs: [64.0.0.0/3, "2000::/3"]},
status: {addresses: [{type: InternalIP, address: 127.0.0.1}, {type: InternalIP, address: 10.0.0.1}, {type: ExternalIP, address: 169.254.0.1}, {type: InternalIP, address: "::"}]}}`))
	verify(t, n, problems, &model.Node{Name: "a", Addresses: addrs("10.0.0.1")},
		"spec.podCIDRs[0]: 64.0.0.0/3 is left out: no node has that many pods; use /8 or longer", "spec.podCIDRs[1]: 2000::/3 is left out",
		"status.addresses[0].address: 127.0.0.1 is a loopback address and is left out",
		"status.addresses[3].address: :: is the unspecified address",
		"status.addresses[2].address: 169.254.0.1 is a link-local address")
	n, problems = Node(object[corev1.Node](t, `{metadata: {name: a}, spec: {podCIDRs: [10.0.0.0/8, "fd00::/16"]}}`))
	verify(t, n, problems, &model.Node{Name: "a",
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/16")}})
	o := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	for i := range 1000 {
		o.Status.Addresses = append(o.Status.Addresses,
			corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: fmt.Sprintf("192.0.%d.%d", i/250, i%250)})
	}
	n, problems = Node(o)
	if n == nil || len(n.Addresses) != maxNodeAddresses || len(problems) != 1 || problems[0].Field != "status.addresses[64]" {
		t.Errorf("%v, problems %v", n, problems)
	}
	for range 1000 {
		o.Spec.PodCIDRs = append(o.Spec.PodCIDRs, "10.0.0.0/24")
	}
	if n, problems = Node(o); n != nil || problems[0].String() != "Node a: spec.podCIDRs: has 1000 entries; the maximum is 64" {
		t.Errorf("%v, problems %v", n, problems)
	}
	n, problems = Node(object[corev1.Node](t, `{metadata: {name: a}, spec: {podCIDR: 127.0.0.0/8}}`))
	verify(t, n, problems, &model.Node{Name: "a"}, "spec.podCIDR: 127.0.0.0/8 is left out: it begins with a loopback address")
}

func TestAReportIsOneLineWhateverItQuotes(t *testing.T) {
	c := checker{where: junk}
	c.report(junk, junk)
	const clean = "a\ufffdlevel=ERROR msg=forged \ufffd[2J\ufffd\ufffdb"
	if want := (model.Problem{Where: clean, Field: clean, What: clean}); c.problems[0] != want {
		t.Errorf("%q", c.problems[0])
	}
}

// TestTextThatIsNotUTF8 is of fields that the API server does not check: a protobuf message with
// such a text cannot be sent, and the agent's API answers with those of all namespaces at once.
func TestTextThatIsNotUTF8(t *testing.T) {
	const bad = "a\xffb"
	s, _ := Service(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "s", Annotations: map[string]string{"spillway.dev/local-redirect": bad}},
		Spec:       corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Port: 80}}},
	})
	if got := s.Annotations["spillway.dev/local-redirect"]; got != "a\ufffdb" {
		t.Errorf("annotation %q", got)
	}
	for _, ref := range []corev1.ObjectReference{
		{Kind: "Pod", Name: bad}, {Kind: "Pod", Name: "p", Namespace: bad}, {Kind: "Pod", Name: "\x1b[2J"},
		{Kind: "Pod", Name: strings.Repeat("a", 254)},
	} {
		slice, _ := EndpointSlice(&discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "n", Name: "s-1", Labels: map[string]string{discoveryv1.LabelServiceName: "s"}},
			AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}, TargetRef: &ref}},
		})
		if got := slice.Endpoints[0].Pod; got != (model.Name{}) {
			t.Errorf("%.40q is taken for a Pod", got)
		}
	}
}
