package kubeobject

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/internal/facts/model"
)

var exactly = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmpopts.EquateEmpty(),
}

// object decodes a YAML object.
func object[T any](t *testing.T, text string) *T {
	t.Helper()
	o := new(T)
	if err := yaml.UnmarshalStrict([]byte(text), o); err != nil {
		t.Fatal(err)
	}
	return o
}

// verify compares the result of a conversion: a model object, or the report.
func verify[M any](t *testing.T, got *M, problems []model.Problem, want *M, report ...string) {
	t.Helper()
	if diff := cmp.Diff(want, got, exactly); diff != "" {
		t.Errorf("object: %s", diff)
	}
	var lines []string
	for _, p := range problems {
		lines = append(lines, p.Field+": "+p.What)
	}
	if len(lines) != len(report) {
		t.Fatalf("problems: %q\nwant %q", lines, report)
	}
	for i := range lines {
		if !strings.HasPrefix(lines[i], report[i]) {
			t.Errorf("problem %q\n  want %q", lines[i], report[i])
		}
	}
}

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func TestServiceDefaults(t *testing.T) {
	s, problems := Service(object[corev1.Service](t, `{metadata: {name: web}, spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}`))
	verify(t, s, problems, &model.Service{
		Name:       model.Name{Namespace: "default", Name: "web"},
		Type:       model.ClusterIP,
		ClusterIPs: addrs("10.96.0.1"),
		Ports:      []model.ServicePort{{Protocol: model.TCP, Port: 80}},
	})
}

func TestServiceWithEverything(t *testing.T) {
	s, problems := Service(object[corev1.Service](t, `
metadata:
  name: web
  namespace: shop
  uid: u1
  creationTimestamp: "2024-05-01T10:00:00Z"
  labels: {service.kubernetes.io/service-proxy-name: spillway}
  annotations: {a: b, spillway.dev/helper: none}
spec:
  type: LoadBalancer
  clusterIP: fd00::1
  clusterIPs: ["fd00::1", 10.96.0.1]
  ipFamilies: [IPv6, IPv4]
  ipFamilyPolicy: RequireDualStack
  externalIPs: [198.51.100.7]
  externalTrafficPolicy: Local
  internalTrafficPolicy: Local
  healthCheckNodePort: 32000
  loadBalancerSourceRanges: [203.0.113.9/24, " 2001:db8::/32"]
  publishNotReadyAddresses: true
  sessionAffinity: ClientIP
  sessionAffinityConfig: {clientIP: {timeoutSeconds: 30}}
  trafficDistribution: PreferSameNode
  ports:
  - {name: dns, port: 53, protocol: UDP, nodePort: 30053, targetPort: dns}
  - {name: dns-tcp, port: 53, nodePort: 30053, appProtocol: kubernetes.io/h2c}
  - {name: sctp, port: 53, protocol: SCTP}
status:
  loadBalancer:
    ingress:
    - {ip: 192.0.2.1}
    - {ip: 192.0.2.2, ipMode: VIP}
    - {ip: 192.0.2.3, ipMode: Proxy}
    - {hostname: lb.example}
`))
	verify(t, s, problems, &model.Service{
		Name:                model.Name{Namespace: "shop", Name: "web"},
		UID:                 "u1",
		Created:             time.Date(2024, 5, 1, 10, 0, 0, 0, time.UTC),
		Type:                model.LoadBalancer,
		ProxyName:           "spillway",
		ClusterIPs:          addrs("fd00::1", "10.96.0.1"),
		ExternalIPs:         addrs("198.51.100.7"),
		LoadBalancerIPs:     addrs("192.0.2.1", "192.0.2.2"),
		SourceRanges:        prefixes("203.0.113.0/24", "2001:db8::/32"),
		Affinity:            30 * time.Second,
		ExternalLocal:       true,
		InternalLocal:       true,
		HealthCheckNodePort: 32000,
		Annotations:         map[string]string{"spillway.dev/helper": "none"},
		Ports: []model.ServicePort{
			{Name: "dns", Protocol: model.UDP, Port: 53, NodePort: 30053},
			{Name: "dns-tcp", Protocol: model.TCP, Port: 53, NodePort: 30053, AppProtocol: "kubernetes.io/h2c"},
			{Name: "sctp", Protocol: model.SCTP, Port: 53},
		},
	})
}

func TestServiceVariants(t *testing.T) {
	convert := func(spec string) *model.Service {
		t.Helper()
		s, problems := Service(object[corev1.Service](t, spec))
		if s == nil || len(problems) > 0 {
			t.Fatalf("%s: %v, %q", spec, s, problems)
		}
		return s
	}
	s := convert(`{metadata: {name: a}, spec: {clusterIPs: [10.0.0.1, "fd00::1"], sessionAffinity: ClientIP, ports: [{port: 1}]}}`)
	if s.Affinity != 3*time.Hour || !cmp.Equal(s.ClusterIPs, addrs("10.0.0.1", "fd00::1"), exactly) {
		t.Errorf("clusterIPs alone: %+v", s)
	}
	s = convert(`{metadata: {name: a, annotations: {service.beta.kubernetes.io/load-balancer-source-ranges: "10.0.0.0/8, 192.0.2.1/32"}}, spec: {type: LoadBalancer, clusterIP: 10.0.0.1, ports: [{port: 1}]}}`)
	if !cmp.Equal(s.SourceRanges, prefixes("10.0.0.0/8", "192.0.2.1/32"), exactly) {
		t.Errorf("annotation: %v", s.SourceRanges)
	}
	s = convert(`{metadata: {name: a, annotations: {service.beta.kubernetes.io/load-balancer-source-ranges: " "}}, spec: {type: LoadBalancer, clusterIP: 10.0.0.1, ports: [{port: 1}]}}`)
	if s.SourceRanges != nil {
		t.Errorf("blank annotation: %v", s.SourceRanges)
	}
}

func TestServiceWithoutProxy(t *testing.T) {
	for _, text := range []string{
		`{metadata: {name: a}, spec: {clusterIP: None, ports: [{port: 80}]}}`,
		`{metadata: {name: a}, spec: {clusterIPs: [None], ports: [{port: 80}]}}`,
		`{metadata: {name: a}, spec: {type: ExternalName, externalName: example.org}}`,
		`{metadata: {name: a}, spec: {clusterIP: 10.0.0.1}}`,
		`{metadata: {name: a, labels: {service.kubernetes.io/headless: ""}}, spec: {clusterIP: 10.0.0.1, ports: [{port: 80}]}}`,
	} {
		s, problems := Service(object[corev1.Service](t, text))
		verify(t, s, problems, nil)
	}
}

func TestServiceProblems(t *testing.T) {
	const ports = `ports: [{port: 80}]`
	tests := []struct{ meta, spec, want string }{
		{``, ports + `, clusterIP: 10.0.0.1`, `metadata.name: is missing`},
		{`name: A/B`, ports + `, clusterIP: 10.0.0.1`, `metadata.name: "A/B" is not an object name`},
		{`name: a, namespace: b.c`, ports + `, clusterIP: 10.0.0.1`, `metadata.namespace: "b.c" is not a namespace name`},
		{`name: a`, ports, `spec.clusterIP: is missing, and no allocator runs here`},
		{`name: a`, ports + `, clusterIP: 10.96.0`, `spec.clusterIP: "10.96.0" is not an IP address`},
		{`name: a`, ports + `, clusterIP: 10.256.0.01`, `spec.clusterIP: "10.256.0.01" is not an IP address`},
		{`name: a`, ports + `, clusterIP: "::ffff:10.0.0.1"`,
			`spec.clusterIP: "::ffff:10.0.0.1" is an IPv4-mapped IPv6 address; write "10.0.0.1"`},
		{`name: a`, ports + `, clusterIP: fe80::1%eth0`, `spec.clusterIP: "fe80::1%eth0" has a zone`},
		{`name: a`, ports + `, clusterIP: 0.0.0.0`, `spec.clusterIP: 0.0.0.0 is the unspecified address`},
		{`name: a`, ports + `, clusterIP: 127.0.0.1`, `spec.clusterIP: 127.0.0.1 is a loopback address`},
		{`name: a`, ports + `, clusterIPs: [10.0.0.1, x]`, `spec.clusterIPs[1]: "x" is not an IP address`},
		{`name: a`, ports + `, clusterIPs: [10.0.0.1, 10.0.0.2]`, `spec.clusterIPs: has 2 addresses; use one, or one of each family`},
		{`name: a`, ports + `, clusterIP: 10.0.0.2, clusterIPs: [10.0.0.1]`,
			`spec.clusterIPs[0]: "10.0.0.1" differs from spec.clusterIP "10.0.0.2"`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, ipFamilies: [IPv6]`, `spec.ipFamilies[0]: is IPv6, but cluster IP 10.0.0.1 is not`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, ipFamilies: [IPv4, IPv6]`, `spec.ipFamilies[1]: IPv6 has no address in spec.clusterIPs`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, ipFamilies: [IPv5]`, `spec.ipFamilies[0]: "IPv5" is unknown; use IPv4, IPv6`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, type: Nodeport`,
			`spec.type: "Nodeport" is unknown; use ClusterIP, NodePort, LoadBalancer, ExternalName`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, externalIPs: [224.0.0.1]`, `spec.externalIPs[0]: 224.0.0.1 is a multicast address`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, externalIPs: [169.254.0.1]`, `spec.externalIPs[0]: 169.254.0.1 is a link-local address`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, externalIPs: [255.255.255.255]`,
			`spec.externalIPs[0]: 255.255.255.255 is the broadcast address`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, sessionAffinity: Cookie`, `spec.sessionAffinity: "Cookie" is unknown; use None, ClientIP`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86401}}`,
			`spec.sessionAffinityConfig.clientIP.timeoutSeconds: is 86401`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, externalTrafficPolicy: Here`, `spec.externalTrafficPolicy: "Here" is unknown`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, internalTrafficPolicy: Here`, `spec.internalTrafficPolicy: "Here" is unknown`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, healthCheckNodePort: 3000`, `spec.healthCheckNodePort: is only for type LoadBalancer with`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 70000`,
			`spec.healthCheckNodePort: 70000 is not a port`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, type: LoadBalancer, loadBalancerSourceRanges: [10.0.0.0]`,
			`spec.loadBalancerSourceRanges[0]: "10.0.0.0" is not a CIDR`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, type: LoadBalancer, loadBalancerSourceRanges: [10.0.0.0/033]`,
			`spec.loadBalancerSourceRanges[0]: "10.0.0.0/33" is not a CIDR`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, type: LoadBalancer, loadBalancerSourceRanges: ["::ffff:1.2.3.4/128"]`,
			`spec.loadBalancerSourceRanges[0]: "::ffff:1.2.3.4/128" is an IPv4-mapped IPv6 range`},
		{`name: a`, ports + `, clusterIP: 10.0.0.1, loadBalancerSourceRanges: [10.0.0.0/8]`,
			`spec.loadBalancerSourceRanges: is only for Services of type LoadBalancer`},
		{`name: a, annotations: {service.beta.kubernetes.io/load-balancer-source-ranges: "10.0.0.0/8,x"}`,
			ports + `, clusterIP: 10.0.0.1, type: LoadBalancer`,
			`metadata.annotations[service.beta.kubernetes.io/load-balancer-source-ranges][1]: "x" is not a CIDR`},
		{`name: a`, `clusterIP: 10.0.0.1, ports: [{port: 0}]`, `spec.ports[0].port: 0 is not a port; use 1 to 65535`},
		{`name: a`, `clusterIP: 10.0.0.1, ports: [{port: 65536}]`, `spec.ports[0].port: 65536 is not a port`},
		{`name: a`, `clusterIP: 10.0.0.1, ports: [{port: 80, protocol: tcp}]`, `spec.ports[0].protocol: "tcp" is unknown; use TCP, UDP, SCTP`},
		{`name: a`, `clusterIP: 10.0.0.1, ports: [{port: 80, name: a}, {port: 81, name: a}]`, `spec.ports[1].name: "a" is listed twice`},
		{`name: a`, `clusterIP: 10.0.0.1, ports: [{port: 80, name: a}, {port: 80, name: b}]`, `spec.ports[1].port: TCP port 80 is listed twice`},
		{`name: a`, `clusterIP: 10.0.0.1, ports: [{port: 80, name: a}, {port: 81}]`, `spec.ports[1].name: is missing`},
		{`name: a`, `clusterIP: 10.0.0.1, ports: [{port: 80, name: A_B}]`, `spec.ports[0].name: "A_B" is not a port name`},
		{`name: a`, `clusterIP: 10.0.0.1, type: NodePort, ports: [{port: 80}]`, `spec.ports[0].nodePort: is missing`},
		{`name: a`, `clusterIP: 10.0.0.1, type: NodePort, ports: [{port: 80, nodePort: -1}]`, `spec.ports[0].nodePort: -1 is not a port`},
		{`name: a`, `clusterIP: 10.0.0.1, type: NodePort, ports: [{name: a, port: 80, nodePort: 3000}, {name: b, port: 81, nodePort: 3000}]`,
			`spec.ports[1].nodePort: TCP node port 3000 is listed twice`},
		{`name: a`, `clusterIP: 10.0.0.1, ports: [{port: 80, nodePort: 3000}]`,
			`spec.ports[0].nodePort: is only for types NodePort and LoadBalancer`},
	}
	for _, tt := range tests {
		t.Run(tt.want, func(t *testing.T) {
			s, problems := Service(object[corev1.Service](t, `{metadata: {`+tt.meta+`}, spec: {`+tt.spec+`}}`))
			verify(t, s, problems, nil, tt.want)
		})
	}
}

// TestLeadingZerosAreDecimal has the objects of kube-proxy's TestBadIPs (pkg/proxy/nftables/proxier_test.go
// of 1.36). An API server before 1.36 stores such addresses.
func TestLeadingZerosAreDecimal(t *testing.T) {
	s, problems := Service(object[corev1.Service](t, `{metadata: {name: svc1}, spec: {type: LoadBalancer, clusterIP: 172.30.0.041,
clusterIPs: [172.30.0.041], externalIPs: [192.168.099.022], loadBalancerSourceRanges: [203.0.113.000/025],
ports: [{name: p80, port: 80, nodePort: 3001}]}, status: {loadBalancer: {ingress: [{ip: 1.2.3.004}]}}}`))
	verify(t, s, problems, &model.Service{
		Name: model.Name{Namespace: "default", Name: "svc1"}, Type: model.LoadBalancer,
		ClusterIPs: addrs("172.30.0.41"), ExternalIPs: addrs("192.168.99.22"), LoadBalancerIPs: addrs("1.2.3.4"),
		SourceRanges: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/25")},
		Ports:        []model.ServicePort{{Name: "p80", Protocol: model.TCP, Port: 80, NodePort: 3001}},
	})
	slice, problems := EndpointSlice(object[discoveryv1.EndpointSlice](t, `{metadata: {name: a, labels: {kubernetes.io/service-name: svc1}},
addressType: IPv4, endpoints: [{addresses: [10.180.00.001]}, {addresses: [10.0.0.0]}]}`))
	if len(problems) > 0 || len(slice.Endpoints) != 2 || slice.Endpoints[0].Addr != netip.MustParseAddr("10.180.0.1") {
		t.Errorf("endpoints %v, problems %v", slice.Endpoints, problems)
	}
}

func TestServiceIngressProblems(t *testing.T) {
	const spec = `metadata: {name: a}, spec: {type: LoadBalancer, clusterIP: 10.0.0.1, ports: [{port: 80}]}`
	s, problems := Service(object[corev1.Service](t,
		`{`+spec+`, status: {loadBalancer: {ingress: [{ip: 1.2.3}, {ip: 1.2.3.4, ipMode: Vip}, {ip: "::"}, {ip: 1.2.3.5}]}}}`))
	verify(t, s, problems, &model.Service{
		Name: model.Name{Namespace: "default", Name: "a"}, Type: model.LoadBalancer,
		ClusterIPs: addrs("10.0.0.1"), LoadBalancerIPs: addrs("1.2.3.5"), Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}},
	},
		`status.loadBalancer.ingress[0].ip: the address is left out: "1.2.3" is not an IP address`,
		`status.loadBalancer.ingress[1].ipMode: the address is left out: "Vip" is unknown; use VIP, Proxy`,
		`status.loadBalancer.ingress[2].ip: the address is left out: :: is the unspecified address`)
}

// A Service is served without some fields if they are invalid.
func TestServiceLeavesOut(t *testing.T) {
	s, problems := Service(object[corev1.Service](t,
		`{metadata: {name: a}, spec: {clusterIP: 10.0.0.1, trafficDistribution: PreferMoon, ports: [{port: 80}]}, status: {loadBalancer: {ingress: [{ip: 1.2.3.4}]}}}`))
	verify(t, s, problems, &model.Service{
		Name: model.Name{Namespace: "default", Name: "a"}, Type: model.ClusterIP,
		ClusterIPs: addrs("10.0.0.1"), Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}},
	}, `status.loadBalancer.ingress: is not used`, `spec.trafficDistribution: "PreferMoon" is unknown and left out`)
}

func TestEndpointSlice(t *testing.T) {
	s, problems := EndpointSlice(object[discoveryv1.EndpointSlice](t, `
metadata:
  name: web-1
  namespace: shop
  labels: {kubernetes.io/service-name: web}
  annotations: {endpoints.kubernetes.io/last-change-trigger-time: "2024-05-01T10:00:00.5Z"}
addressType: IPv6
ports:
- {port: 8080}
- {name: dns, port: 53, protocol: UDP, appProtocol: dns}
- {name: any}
endpoints:
- addresses: ["fd00::1", "fd00::2"]
- {addresses: ["fd00::3"], conditions: {ready: false}}
- {addresses: ["fd00::4"], conditions: {ready: false, serving: true, terminating: true}, nodeName: n1, zone: z1}
- {addresses: ["fd00::5"], hints: {forZones: [{name: z2}], forNodes: [{name: n2}]}, targetRef: {kind: Pod, name: p}}
- {addresses: ["fd00::6"], targetRef: {kind: Pod, namespace: o, name: p}}
- {addresses: ["fd00::7"], targetRef: {kind: VM, name: p}}
`))
	verify(t, s, problems, &model.EndpointSlice{
		Name:      model.Name{Namespace: "shop", Name: "web-1"},
		Service:   model.Name{Namespace: "shop", Name: "web"},
		Family:    model.IPv6,
		Triggered: time.Date(2024, 5, 1, 10, 0, 0, 5e8, time.UTC),
		Ports: []model.EndpointPort{
			{Protocol: model.TCP, Port: 8080},
			{Name: "dns", Protocol: model.UDP, Port: 53},
		},
		Endpoints: []model.Endpoint{
			{Addr: netip.MustParseAddr("fd00::1"), Ready: true, Serving: true},
			{Addr: netip.MustParseAddr("fd00::3")},
			{Addr: netip.MustParseAddr("fd00::4"), Serving: true, Terminating: true, Node: "n1"},
			{Addr: netip.MustParseAddr("fd00::5"), Ready: true, Serving: true, Hints: &model.Hints{Zones: []string{"z2"}, Nodes: []string{"n2"}},
				Pod: model.Name{Namespace: "shop", Name: "p"}},
			{Addr: netip.MustParseAddr("fd00::6"), Ready: true, Serving: true, Pod: model.Name{Namespace: "o", Name: "p"}},
			{Addr: netip.MustParseAddr("fd00::7"), Ready: true, Serving: true},
		},
	}, `ports[2].port: the port is left out: is missing; give the port`)
}

func TestEndpointSliceWithoutUse(t *testing.T) {
	for _, text := range []string{
		`{metadata: {name: a}, addressType: IPv4, endpoints: []}`,
		`{metadata: {name: a, labels: {kubernetes.io/service-name: w}}, addressType: FQDN, endpoints: [{addresses: [example.org]}]}`,
		`{metadata: {name: a, labels: {kubernetes.io/service-name: w, service.kubernetes.io/headless: ""}}, addressType: IPv4, endpoints: []}`,
	} {
		s, problems := EndpointSlice(object[discoveryv1.EndpointSlice](t, text))
		verify(t, s, problems, nil)
	}
}

func TestEndpointSliceProblems(t *testing.T) {
	const meta = `metadata: {name: a, labels: {kubernetes.io/service-name: w}}, `
	for text, want := range map[string]string{
		`endpoints: []`:                    `addressType: is missing`,
		`addressType: ipv4, endpoints: []`: `addressType: "ipv4" is unknown; use IPv4, IPv6, FQDN`,
	} {
		s, problems := EndpointSlice(object[discoveryv1.EndpointSlice](t, `{`+meta+text+`}`))
		verify(t, s, problems, nil, want)
	}
	s, problems := EndpointSlice(object[discoveryv1.EndpointSlice](t,
		`{metadata: {name: a, labels: {kubernetes.io/service-name: w}, annotations: {endpoints.kubernetes.io/last-change-trigger-time: noon}}, addressType: IPv4, endpoints: []}`))
	verify(t, s, problems, &model.EndpointSlice{Name: model.Name{Namespace: "default", Name: "a"},
		Service: model.Name{Namespace: "default", Name: "w"}, Family: model.IPv4},
		`metadata.annotations[endpoints.kubernetes.io/last-change-trigger-time]: "noon" is not an RFC 3339 time`)
}

// A bad port or address of a slice costs only itself.
func TestEndpointSliceLeavesOut(t *testing.T) {
	const most = 420
	convert := func(text string) (*model.EndpointSlice, []model.Problem) {
		return EndpointSlice(object[discoveryv1.EndpointSlice](t,
			`{metadata: {name: a, labels: {kubernetes.io/service-name: w}}, addressType: IPv4, `+text+`}`))
	}
	slice := func(endpoints ...string) *model.EndpointSlice {
		s := &model.EndpointSlice{Name: model.Name{Namespace: "default", Name: "a"},
			Service: model.Name{Namespace: "default", Name: "w"}, Family: model.IPv4}
		for _, a := range endpoints {
			s.Endpoints = append(s.Endpoints, model.Endpoint{Addr: netip.MustParseAddr(a), Ready: true, Serving: true})
		}
		return s
	}
	for addresses, want := range map[string]string{
		`[]`:                     `endpoints[1].addresses: the endpoint is left out: is empty`,
		`[1.2.3]`:                `endpoints: 1 address gets no traffic: "1.2.3" is not an IP address; correct`,
		`["fd00::1"]`:            `endpoints: 1 address gets no traffic: fd00::1 is not IPv4, which the slice's addressType says; correct`,
		`[127.0.0.1]`:            `endpoints: 1 address gets no traffic: 127.0.0.1 is a loopback address; correct`,
		`[255.255.255.255]`:      `endpoints: 1 address gets no traffic: 255.255.255.255 is the broadcast address; correct the slice, or the program that writes it`,
		`[224.0.0.1, 127.0.0.1]`: `endpoints: 2 addresses get no traffic: 127.0.0.1 is a loopback address, 224.0.0.1 is a multicast address; correct`,
		`[0.0.0.0, 127.0.0.6, 127.0.0.5, 127.0.0.4, 127.0.0.3, 127.0.0.3]`: `endpoints: 5 addresses get no traffic: 0.0.0.0 is the unspecified address, 127.0.0.3 is a loopback address, 127.0.0.4 is a loopback address, 127.0.0.5 is a loopback address, and 1 more; correct`,
	} {
		s, problems := convert(`endpoints: [{addresses: [10.0.0.1]}, {addresses: ` + addresses + `}, {addresses: [10.0.0.2]}]`)
		verify(t, s, problems, slice("10.0.0.1", "10.0.0.2"), want)
		for _, p := range problems {
			if name, ok := p.Service(); !ok || name != s.Service || p.Where != "EndpointSlice default/a" || len(p.What) > most {
				t.Errorf("about Service %v, where %q, %d bytes", name, p.Where, len(p.What))
			}
		}
	}
	s, problems := convert(`endpoints: [{addresses: [127.0.0.1, 10.0.0.1]}]`)
	verify(t, s, problems, slice("10.0.0.1"), `endpoints: 1 address gets no traffic: 127.0.0.1`)

	for ports, want := range map[string]string{
		`{port: 0}`:                 `ports[1].port: the port is left out: 0 is not a port`,
		`{port: 2, protocol: ICMP}`: `ports[1].protocol: the port is left out: "ICMP" is unknown`,
		`{port: 2, name: b}`:        `ports[1].name: the port is left out: "b" is listed twice`,
		`{port: 1, name: "` + strings.Repeat("x", 999) + `"}`: `ports[1].name: the port is left out: "xxx`,
	} {
		s, problems := convert(`endpoints: [], ports: [{name: b, port: 1}, ` + ports + `, {name: c, port: 3}]`)
		wanted := slice()
		wanted.Ports = []model.EndpointPort{{Name: "b", Protocol: model.TCP, Port: 1}, {Name: "c", Protocol: model.TCP, Port: 3}}
		verify(t, s, problems, wanted, want)
		if len(problems) > 0 && len(problems[0].What) > most {
			t.Errorf("%d bytes in one line", len(problems[0].What))
		}
	}
}

func TestNode(t *testing.T) {
	n, problems := Node(object[corev1.Node](t, `
metadata: {name: n1, labels: {topology.kubernetes.io/zone: z1}, annotations: {spillway.dev/egress-addresses: 203.0.113.0/28, other: x}}
spec: {podCIDR: 10.244.1.0/24, podCIDRs: [10.244.1.0/24, "fd00:1::/64"]}
status: {addresses: [{type: Hostname, address: n1}, {type: ExternalIP, address: 203.0.113.1}, {type: InternalIP, address: 192.0.2.1}, {type: InternalIP, address: "fd01::1"}]}
`))
	verify(t, n, problems, &model.Node{
		Name: "n1", Labels: map[string]string{"topology.kubernetes.io/zone": "z1"},
		Addresses:   addrs("192.0.2.1", "fd01::1", "203.0.113.1"),
		PodCIDRs:    prefixes("10.244.1.0/24", "fd00:1::/64"),
		Annotations: map[string]string{"spillway.dev/egress-addresses": "203.0.113.0/28"},
	})
	n, problems = Node(object[corev1.Node](t, `{metadata: {name: n1}, spec: {podCIDR: 10.244.1.0/24}}`))
	verify(t, n, problems, &model.Node{Name: "n1", PodCIDRs: prefixes("10.244.1.0/24")})
	for text, want := range map[string]string{
		`{metadata: {}}`: `metadata.name: is missing`,
		`{metadata: {name: n}, spec: {podCIDR: 10.0.0.0}}`:                                                           `spec.podCIDR: "10.0.0.0" is not a CIDR`,
		`{metadata: {name: n}, spec: {podCIDRs: [10.0.0.0/24, x]}}`:                                                  `spec.podCIDRs[1]: "x" is not a CIDR`,
		`{metadata: {name: n}, spec: {podCIDR: 10.0.1.0/24, podCIDRs: [10.0.0.0/24]}}`:                               `spec.podCIDRs[0]: "10.0.0.0/24" differs`,
		`{metadata: {name: n}, status: {addresses: [{type: Hostname, address: x}, {type: InternalIP, address: x}]}}`: `status.addresses[1].address: "x" is not an IP address`,
	} {
		n, problems := Node(object[corev1.Node](t, text))
		verify(t, n, problems, nil, want)
	}
}

func TestPod(t *testing.T) {
	p, problems := Pod(object[corev1.Pod](t, `{metadata: {name: p, labels: {a: b}}, spec: {nodeName: n1, containers: []}, status: {podIP: 10.0.0.1, podIPs: [{ip: 10.0.0.1}, {ip: "fd00::1"}]}}`))
	verify(t, p, problems, &model.Pod{Name: model.Name{Namespace: "default", Name: "p"}, Labels: map[string]string{"a": "b"}, Node: "n1",
		IPs: addrs("10.0.0.1", "fd00::1")})
	p, problems = Pod(object[corev1.Pod](t, `{metadata: {name: p}, status: {podIP: 10.0.0.1}}`))
	verify(t, p, problems, &model.Pod{Name: model.Name{Namespace: "default", Name: "p"}, IPs: addrs("10.0.0.1")})
	p, problems = Pod(object[corev1.Pod](t, `{metadata: {name: p}, status: {podIP: 10.0.0.1}, spec: {
		initContainers: [{name: s, ports: [{containerPort: 7, hostPort: 8, protocol: UDP}]}],
		containers: [{name: a, ports: [{containerPort: 80}, {containerPort: 81, hostPort: 8081, hostIP: 192.0.2.1}]}, {name: b, ports: [{containerPort: 9, hostPort: 99999}, {containerPort: 10, hostPort: 8010, hostIP: 10.0.0.300}]}]}}`))
	verify(t, p, problems, &model.Pod{Name: model.Name{Namespace: "default", Name: "p"}, IPs: addrs("10.0.0.1"),
		HostPorts: []model.HostPort{{Protocol: model.TCP, Port: 81, Host: 8081, IP: netip.MustParseAddr("192.0.2.1")},
			{Protocol: model.UDP, Port: 7, Host: 8}}})
	for _, text := range []string{
		`{metadata: {name: p}, spec: {hostNetwork: true, containers: []}, status: {podIP: 10.0.0.1}}`,
		`{metadata: {name: p}, status: {phase: Succeeded, podIP: 10.0.0.1}}`,
		`{metadata: {name: p}, status: {phase: Failed, podIP: 10.0.0.1}}`,
	} {
		p, problems := Pod(object[corev1.Pod](t, text))
		verify(t, p, problems, nil)
	}
	p, problems = Pod(object[corev1.Pod](t, `{metadata: {name: p}, status: {podIPs: [{ip: 10.0.0.1}, {ip: x}]}}`))
	verify(t, p, problems, nil, `status.podIPs[1].ip: "x" is not an IP address`)
	p, problems = Pod(object[corev1.Pod](t, `{metadata: {name: p}, status: {podIP: x}}`))
	verify(t, p, problems, nil, `status.podIP: "x" is not an IP address`)
}

func TestNetworkPolicy(t *testing.T) {
	name := model.Name{Namespace: "default", Name: "p"}
	for text, want := range map[string]*model.NetworkPolicy{
		`{podSelector: {}}`:                                       {Name: name, Ingress: true},
		`{podSelector: {}, egress: [{}]}`:                         {Name: name, Ingress: true, Egress: true},
		`{podSelector: {}, policyTypes: [Egress]}`:                {Name: name, Egress: true},
		`{podSelector: {}, policyTypes: [Ingress], egress: [{}]}`: {Name: name, Ingress: true},
		`{podSelector: {matchLabels: {a: b}, matchExpressions: [{key: c, operator: In, values: [d]}]}}`: {Name: name, Ingress: true,
			Selector: model.Selector{
				MatchLabels: map[string]string{"a": "b"},
				Expressions: []model.Requirement{{Key: "c", Operator: "In", Values: []string{"d"}}},
			}},
	} {
		n, problems := NetworkPolicy(object[networkingv1.NetworkPolicy](t, `{metadata: {name: p}, spec: `+text+`}`))
		verify(t, n, problems, want)
	}
	for text, want := range map[string]string{
		`{podSelector: {}, policyTypes: [Both]}`:                        `spec.policyTypes[0]: "Both" is unknown; use Ingress, Egress`,
		`{podSelector: {matchExpressions: [{key: c, operator: Like}]}}`: `spec.podSelector.matchExpressions[0].operator: Invalid value: "Like": not a valid selector operator`,
		`{podSelector: {matchExpressions: [{key: c, operator: In}]}}`:   `spec.podSelector.matchExpressions[0].values: Required value`,
		`{podSelector: {matchLabels: {"a b": c}}}`:                      `spec.podSelector.matchLabels: Invalid value: "a b"`,
	} {
		n, problems := NetworkPolicy(object[networkingv1.NetworkPolicy](t, `{metadata: {name: p}, spec: `+text+`}`))
		verify(t, n, problems, &model.NetworkPolicy{Name: name, Ingress: true, Egress: true}, want,
			"spec: is taken to select every pod of namespace default, in both directions, until it can be read")
	}
	n, problems := NetworkPolicy(object[networkingv1.NetworkPolicy](t, `{metadata: {name: P}, spec: {podSelector: {}}}`))
	verify(t, n, problems, nil, `metadata.name: "P" is not an object name`)
}
