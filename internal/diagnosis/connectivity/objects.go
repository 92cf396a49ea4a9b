package connectivity

import (
	"cmp"
	"encoding/json"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

// Labels of Pods, and their values.
const (
	roleLabel  = "spillway.dev/connectivity-role"
	nameLabel  = "spillway.dev/connectivity-name"
	roleServer = "server"
	roleClient = "client"
)

const accountName = "connectivity"

// namespaceObject returns the namespace. Clients on the host network are admitted only
// where the Pod Security profile is privileged.
func namespaceObject(hostNetwork bool) *corev1.Namespace {
	profile := "restricted"
	if hostNetwork {
		profile = "privileged"
	}
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		GenerateName: "spillway-test-",
		Labels: map[string]string{
			"app.kubernetes.io/name":             "spillway-connectivity-test",
			"pod-security.kubernetes.io/enforce": profile,
		},
	}}
}

// serviceAccount returns an account without rights. The namespace's own would be created
// some time after the namespace.
func serviceAccount() *corev1.ServiceAccount {
	return &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: accountName}, AutomountServiceAccountToken: ptr.To(false)}
}

func serviceObject(name string, spec corev1.ServiceSpec) *corev1.Service {
	spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyPreferDualStack)
	for _, proto := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		spec.Ports = append(spec.Ports, corev1.ServicePort{
			Name: map[corev1.Protocol]string{corev1.ProtocolTCP: "tcp", corev1.ProtocolUDP: "udp"}[proto],
			Port: servicePort, TargetPort: intstr.FromInt32(Port), Protocol: proto,
		})
	}
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}
}

// pod returns a Pod on a Node. It satisfies the Pod Security profile "restricted", but for
// the network of the host.
func (r *run) pod(name, node, role string, hostNetwork bool, args ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{roleLabel: role, nameLabel: name}},
		Spec: corev1.PodSpec{
			HostNetwork:                   hostNetwork,
			RestartPolicy:                 corev1.RestartPolicyNever,
			ServiceAccountName:            accountName,
			AutomountServiceAccountToken:  ptr.To(false),
			EnableServiceLinks:            ptr.To(false),
			TerminationGracePeriodSeconds: ptr.To(int64(1)),
			Tolerations:                   []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
				}}},
			}},
			SecurityContext: &corev1.PodSecurityContext{
				RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To(int64(65534)), RunAsGroup: ptr.To(int64(65534)),
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []corev1.Container{{
				Name: role, Image: r.Image, ImagePullPolicy: cmp.Or(r.Pull, corev1.PullIfNotPresent), Args: args,
				TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
				Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
					corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("32Mi"),
				}},
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: ptr.To(false), ReadOnlyRootFilesystem: ptr.To(true),
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
			}},
		},
	}
}

// balancerPatch is the status of a Service with the addresses of its families.
func balancerPatch(addrs [2]netip.Addr, v6 []bool) []byte {
	var ingress []corev1.LoadBalancerIngress
	for _, a := range addrs {
		if slices.Contains(v6, a.Is6()) {
			ingress = append(ingress, corev1.LoadBalancerIngress{IP: a.String(), IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)})
		}
	}
	return mustJSON(map[string]any{"status": map[string]any{"loadBalancer": map[string]any{"ingress": ingress}}})
}

// rangesPatch allows the addresses of clients on the pod network.
func rangesPatch(pods map[string]*corev1.Pod, clients []client) []byte {
	ranges := slices.Clone(foreignRanges)
	for _, c := range clients {
		if !c.hostNetwork {
			for _, a := range addresses(pods[c.name]) {
				ranges = append(ranges, netip.PrefixFrom(a, a.BitLen()).String())
			}
		}
	}
	return mustJSON(map[string]any{"spec": map[string]any{"loadBalancerSourceRanges": ranges}})
}

// addresses returns the addresses of a Pod; none of nil.
func addresses(p *corev1.Pod) (list []netip.Addr) {
	if p == nil {
		return nil
	}
	for _, ip := range p.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			list = append(list, a)
		}
	}
	return list
}

func encode(p Plan) string { return string(mustJSON(p)) }

func mustJSON(value any) []byte {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // values of this package always marshal
	}
	return text
}
