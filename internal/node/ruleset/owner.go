package ruleset

import "regexp"

// owners are recognized by the names of chains and tables, or by the text of rules. The
// first match counts.
var owners = []struct {
	name string
	sign *regexp.Regexp // of "TABLE CHAIN TEXT"
}{
	{"Spillway", regexp.MustCompile(`^spillway|^\S+ SPW-|-j SPW-`)},
	{"kubelet", regexp.MustCompile(`^\S+ KUBE-(KUBELET|FIREWALL)`)},
	{"kube-router", regexp.MustCompile(`^\S+ KUBE-(ROUTER|NWPLCY|POD-FW)`)},
	{"kube-proxy", regexp.MustCompile(`^kube-proxy |^\S+ KUBE-|-j KUBE-`)},
	{"flannel", regexp.MustCompile(`^flannel-|^\S+ FLANNEL-|-j FLANNEL-|flanneld`)},
	{"Docker", regexp.MustCompile(`^docker-|^\S+ DOCKER|-j DOCKER|-o (docker|br-[0-9a-f]{12})|oifname != "(docker|br-[0-9a-f]{12})`)},
	{"Calico", regexp.MustCompile(`^calico|^\S+ cali-|-j cali-|cali:`)},
	{"Cilium", regexp.MustCompile(`^\S+ (OLD_)?CILIUM_|-j CILIUM_|cilium`)},
	{"Antrea", regexp.MustCompile(`^antrea|ANTREA-`)},
	{"Weave", regexp.MustCompile(`WEAVE`)},
	{"AWS VPC CNI", regexp.MustCompile(`AWS-(SNAT|CONNMARK)-CHAIN|AWS, SNAT`)},
	{"ip-masq-agent", regexp.MustCompile(`IP-MASQ`)},
	{"kindnet", regexp.MustCompile(`KIND-MASQ-AGENT|^kindnet|^kube-network-policies`)},
	{"OVN-Kubernetes", regexp.MustCompile(`OVN-KUBE|^ovn-kube`)},
	{"Podman (netavark)", regexp.MustCompile(`NETAVARK|^netavark`)},
	{"libvirt", regexp.MustCompile(`LIBVIRT_|^libvirt`)},
	{"a CNI plugin (bridge, portmap)", regexp.MustCompile(`^\S+ CNI-|-j CNI-|^cni_|name: \\?"[^"]*" id: `)},
	{"firewalld", regexp.MustCompile(`^firewalld `)},
}

// Owner returns the program that owns a rule; "" if it is unknown.
func (r *Rule) Owner() string {
	text := r.Table + " " + r.Chain + " " + r.Text
	for _, o := range owners {
		if o.sign.MatchString(text) {
			return o.name
		}
	}
	return ""
}
