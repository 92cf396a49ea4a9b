package images

import (
	"path/filepath"

	"spillway.dev/spillway/hack/image"
)

// recipe describes an image: programs in it, and what its configuration says.
type recipe struct {
	Name     string            // of the image, without the tag
	Tag      string            // "" is the version of Kubernetes
	Programs map[string]string // path in the image of each program of hack/peers
	Files    map[string]string // path in the image of each file in Kubernetes' source
	Debian   bool              // with the tools of package debian
	Links    map[string]string // symbolic links and where they lead
	Config   image.Config
}

// tools are the Debian packages of every image that has more than one static program.
// A layer with all of them is stored once in a node, whatever the number of its images.
var tools = []string{
	// a shell and what scripts call
	"bash", "coreutils", "dash", "findutils", "grep", "hostname", "libc-bin", "mawk", "procps", "sed", "util-linux",
	"bind9-dnsutils", "curl", "iputils-ping", "iproute2", "netcat-openbsd", "wget", // clients, for the e2e tests
	"conntrack", "ipset", "iptables", "kmod", "nftables", // what kube-proxy, flannel and tests of nodes call
	"nginx-light",
}

// alternatives are the links that update-alternatives would make.
var alternatives = map[string]string{
	"/usr/bin/awk":                "mawk",
	"/usr/bin/nc":                 "nc.openbsd",
	"/usr/sbin/ip6tables":         "ip6tables-nft",
	"/usr/sbin/ip6tables-restore": "ip6tables-nft-restore",
	"/usr/sbin/ip6tables-save":    "ip6tables-nft-save",
	"/usr/sbin/iptables":          "iptables-nft",
	"/usr/sbin/iptables-restore":  "iptables-nft-restore",
	"/usr/sbin/iptables-save":     "iptables-nft-save",
}

const (
	registry = "registry.k8s.io/"
	e2e      = registry + "e2e-test-images/"
	metalLB  = "quay.io/metallb/"
)

// recipes has the image of each short name. Names and tags are those that e2e.test,
// kubeadm, and the manifests of flannel and MetalLB ask for; a test compares them.
var recipes = map[string]recipe{
	"pause": {Name: registry + "pause", Tag: "3.10.2", Programs: map[string]string{pause: "/pause"},
		Config: image.Config{Entrypoint: []string{"/pause"}, User: "65535:65535"}},

	// agnhost-2 is for tests that replace the entrypoint, and /uploads is netexec's. Tests
	// of DNS start CoreDNS in it.
	"agnhost": {Name: e2e + "agnhost", Tag: "2.63.0", Debian: true,
		Programs: map[string]string{"agnhost": "/agnhost", "coredns": "/coredns"},
		Files: map[string]string{
			"test/images/agnhost/porter/localhost.crt": "/localhost.crt",
			"test/images/agnhost/porter/localhost.key": "/localhost.key",
		},
		Links:  map[string]string{"/agnhost-2": "agnhost", "/uploads": "tmp"},
		Config: image.Config{Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"}}},
	"busybox":             {Name: e2e + "busybox", Tag: "1.37.0-1", Debian: true, Config: image.Config{Cmd: []string{"sh"}}},
	"distroless-iptables": {Name: registry + "build-image/distroless-iptables", Tag: "v0.9.6", Debian: true},
	"glibc-dns-testing":   {Name: e2e + "glibc-dns-testing", Tag: "2.0.0", Debian: true, Config: image.Config{Cmd: []string{"bash"}}},
	"nginx": {Name: e2e + "nginx", Tag: "1.15-4", Debian: true,
		Config: image.Config{Cmd: []string{"nginx", "-g", "daemon off;"}}},
	"regression-issue-74839": {Name: e2e + "regression-issue-74839", Tag: "1.4",
		Programs: map[string]string{"regression-issue-74839": "/regression-issue-74839"},
		Config:   image.Config{Entrypoint: []string{"/regression-issue-74839"}}},

	"coredns": {Name: registry + "coredns/coredns", Tag: "v1.14.2", Programs: map[string]string{"coredns": "/coredns"},
		Config: image.Config{Entrypoint: []string{"/coredns"}, WorkingDir: "/"}},
	"etcd": {Name: registry + "etcd", Tag: "3.6.8-0", Programs: map[string]string{"etcd": "/usr/local/bin/etcd"}},
	"kube-proxy": {Name: registry + "kube-proxy", Debian: true, Programs: local("kube-proxy"),
		Config: image.Config{Entrypoint: []string{"/usr/local/bin/kube-proxy"}}},
	"kube-apiserver":          {Name: registry + "kube-apiserver", Programs: local("kube-apiserver")},
	"kube-controller-manager": {Name: registry + "kube-controller-manager", Programs: local("kube-controller-manager")},
	"kube-scheduler":          {Name: registry + "kube-scheduler", Programs: local("kube-scheduler")},

	"flannel": {Name: "ghcr.io/flannel-io/flannel", Tag: "v0.28.10", Debian: true,
		Programs: map[string]string{"flanneld": "/opt/bin/flanneld", "install-conf": "/opt/bin/install-conf"},
		Config:   image.Config{Entrypoint: []string{"/opt/bin/flanneld"}}},
	"flannel-cni-plugin": {Name: "ghcr.io/flannel-io/flannel-cni-plugin", Tag: "v1.9.1-flannel3", Debian: true,
		Programs: map[string]string{"flannel": "/flannel"}},

	"metallb-controller": {Name: metalLB + "controller", Tag: "v0.15.2", Programs: map[string]string{"metallb-controller": "/controller"},
		Config: image.Config{Entrypoint: []string{"/controller"}}},
	"metallb-speaker": {Name: metalLB + "speaker", Tag: "v0.15.2", Programs: map[string]string{"metallb-speaker": "/speaker"},
		Config: image.Config{Entrypoint: []string{"/speaker"}}},
}

func local(program string) map[string]string {
	return map[string]string{program: filepath.Join("/usr/local/bin", program)}
}

// MetalLBManifest is the file of MetalLB's module that installs it.
const MetalLBManifest = "config/manifests/metallb-native.yaml"

// The images of each purpose, by their short names.
var (
	// Tests are the images of the e2e tests that Spillway runs.
	Tests = []string{"agnhost", "busybox", "distroless-iptables", "glibc-dns-testing", "nginx", "pause", "regression-issue-74839"}
	// Flannel are the images of flannel's manifest.
	Flannel = []string{"flannel", "flannel-cni-plugin"}
	// MetalLB are the images of MetalLB's manifest.
	MetalLB = []string{"metallb-controller", "metallb-speaker"}
	// Kubeadm are the images of a node that kubeadm makes.
	Kubeadm = []string{"coredns", "etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "pause"}
)
