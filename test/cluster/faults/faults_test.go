// Package faults breaks one thing at a time on a real cluster. An operator must see one
// line that says what is wrong, where, and what to do. Services continue meanwhile, and
// everything works again after the fix.
package faults

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
	"spillway.dev/spillway/test/cluster/programs"
	"spillway.dev/spillway/test/testbed/topology"
)

const (
	namespace = "kube-system"
	selector  = "app.kubernetes.io/name=spillway"
	nodes     = 2
	// ownRegistry is an address that containerd reads by HTTP.
	ownRegistry = "localhost:5000"
)

// nodePort is the peers' as text.
var nodePort = strconv.Itoa(clustertest.NodePort)

var proxyMode = flag.String("proxy-mode", "ebpf", "proxyMode of Spillway's chart")

func TestMain(m *testing.M) { os.Exit(clustertest.Main(m)) }

// env is a cluster on which faults happen.
type env struct {
	*cluster.Cluster
	chart      string
	images     registry
	clusterIPs []string
}

func TestFaults(t *testing.T) {
	e := start(t, cluster.Config{Nodes: nodes})
	e.wantService(t)
	for _, test := range []struct {
		name  string
		do    func(*testing.T, *env)
		short bool // also with -short
		ebpf  bool // of this dataplane alone
	}{
		{name: "no address of the API server", do: noAPIServer, short: true},
		{name: "unknown mode", do: unknownMode},
		{name: "second release", do: secondRelease, short: true},
		{name: "API server at another address", do: wrongAPIServer},
		{name: "image of another architecture", do: wrongArchitecture},
		{name: "image by digest", do: byDigest, short: true},
		{name: "digest that the registry lacks", do: unknownDigest},
		{name: "bpffs not mounted", do: noBPFFS, short: true, ebpf: true},
		{name: "bpffs read-only", do: readOnlyBPFFS, ebpf: true},
		{name: "run directory read-only", do: readOnlyRun},
		{name: "no NET_ADMIN", do: func(t *testing.T, e *env) { missingCapability(t, e, "NET_ADMIN") }, short: true},
		{name: "no BPF", do: func(t *testing.T, e *env) { missingCapability(t, e, "BPF") }, ebpf: true},
		{name: "no PERFMON", do: func(t *testing.T, e *env) { missingCapability(t, e, "PERFMON") }, ebpf: true},
		{name: "seccomp profile denies bpf", do: seccomp, ebpf: true},
		{name: "cgroup root does not exist", do: noCgroupRoot, ebpf: true},
		{name: "cgroup root is no cgroup2", do: wrongCgroupRoot, ebpf: true},
		{name: "no agent on a node", do: noAgentOnANode, short: true},
		{name: "CRD missing", do: noCRD, short: true},
		{name: "CRD without the agent's version", do: oldCRDVersion},
		{name: "CRD without a field of the policy", do: oldCRDField},
	} {
		if testing.Short() && !test.short || test.ebpf && *proxyMode != "ebpf" {
			continue
		}
		t.Run(test.name, func(t *testing.T) {
			test.do(t, e)
			e.wantHealthy(t)
		})
	}
}

// Faults that Helm reports before anything changes.

func noAPIServer(t *testing.T, e *env) {
	e.wantRefused(t, "k8sServiceHost is not set: with mode: replace the Service \"kubernetes\" does not work before the agent runs: "+
		"set k8sServiceHost and k8sServicePort to an address of the API server")
}

func unknownMode(t *testing.T, e *env) {
	e.wantRefused(t, "at '/proxyMode': value must be one of 'ebpf', 'nftables', 'iptables'", "k8sServiceHost="+e.APIServer(), "proxyMode=ipvs")
}

func secondRelease(t *testing.T, e *env) {
	e.wantRefused(t, "release spillway in namespace kube-system already runs Spillway on these nodes, and a node can have one agent: "+
		"upgrade or uninstall that release, or give both a nodeSelector that no node shares", "k8sServiceHost="+e.APIServer())
}

// wantRefused installs a release in another namespace and expects that Helm refuses it.
func (e *env) wantRefused(t *testing.T, want string, values ...string) {
	t.Helper()
	args := []string{"install", "second", e.chart, "--namespace", "default"}
	for _, v := range values {
		args = append(args, "--set", v)
	}
	_, err := e.Helm(t.Context(), args...)
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Fatalf("helm install: %v, want %q", err, want)
	}
	t.Log(err)
	if out, err := e.Helm(t.Context(), "list", "--namespace", "default", "--short"); err != nil || out != "" {
		t.Errorf("releases after it: %q, %v, want none", out, err)
	}
}

// Faults of values that only a node can notice.

func wrongAPIServer(t *testing.T, e *env) {
	e.upgrade(t, "k8sServiceHost="+e.Node(0).Host().IPv4.Next().Next().Next().String())
	e.wantLine(t, "log", "API server 172.30.0.13:6443",
		"cannot be reached: no route to host; the last state stays in effect, and the agent retries")
}

func wrongArchitecture(t *testing.T, e *env) {
	_, arm64, err := e.images.digests("arm64")
	clustertest.Must(t, err)
	e.upgrade(t, "image.repository="+ownRegistry+"/spillway", "image.digest="+arm64, "image.pullPolicy=IfNotPresent")
	e.wantLine(t, "status", "exec /usr/bin/spillway: exec format error")
}

func byDigest(t *testing.T, e *env) {
	all, _, err := e.images.digests("amd64")
	clustertest.Must(t, err)
	e.upgrade(t, "image.repository="+ownRegistry+"/spillway", "image.digest="+all, "image.pullPolicy=Always")
	clustertest.Must(t, e.WaitForRollout(t.Context(), namespace, "daemonset/spillway"))
	for _, pod := range e.pods(t) {
		for _, s := range pod.Status.ContainerStatuses {
			if !strings.HasSuffix(s.ImageID, all) {
				t.Errorf("%s runs %s, want %s", pod.Metadata.Name, s.ImageID, all)
			}
		}
	}
}

func unknownDigest(t *testing.T, e *env) {
	e.upgrade(t, "image.repository="+ownRegistry+"/spillway", "image.digest=sha256:"+strings.Repeat("ab", 32), "image.pullPolicy=IfNotPresent")
	e.wantLine(t, "status", "localhost:5000/spillway@sha256:abab", "not found")
}

func noCgroupRoot(t *testing.T, e *env) {
	e.upgrade(t, "cgroupRoot=/sys/fs/cgroup/none")
	e.wantLine(t, "event", `MountVolume.SetUp failed for volume "cgroup" : hostPath type check failed: /sys/fs/cgroup/none is not a directory`)
}

func wrongCgroupRoot(t *testing.T, e *env) {
	e.upgrade(t, "cgroupRoot=/etc")
	e.wantLine(t, "status", "eBPF dataplane needs a cgroup2 directory, /host/cgroup is none: "+
		`give --cgroup-root, in the chart cgroupRoot, one that "findmnt -t cgroup2" shows on the node`)
}

// Faults of a node.

// noBPFFS removes what the node had pinned: it has no Services until the fix.
func noBPFFS(t *testing.T, e *env) {
	e.upgrade(t, "bpffs.autoMount=false")
	clustertest.Must(t, e.WaitForRollout(t.Context(), namespace, "daemonset/spillway"))
	e.run(t, "umount --lazy /sys/fs/bpf")
	e.restartAgent(t)
	e.wantLine(t, "status", "mount BPF file system at /sys/fs/bpf: a mount in this container would end with it: "+
		"run \"mount -t bpf bpf /sys/fs/bpf\" on the node, or set bpffs.autoMount of the chart")
	e.wantServiceAt(t, e.Node(0))
	e.run(t, "mount -t bpf bpf /sys/fs/bpf")
	e.restartAgent(t)
	clustertest.Must(t, e.WaitForRollout(t.Context(), namespace, "daemonset/spillway"))
	e.wantService(t)
	e.run(t, "umount --lazy /sys/fs/bpf")
	e.fix(t) // mounts it
	e.run(t, "findmnt --types bpf /sys/fs/bpf")
}

func readOnlyBPFFS(t *testing.T, e *env) {
	e.run(t, "mount -o remount,bind,ro /sys/fs/bpf")
	e.restartAgent(t)
	e.wantLine(t, "status", "use BPF file system at /sys/fs/bpf",
		"read-only file system: mount it writable on the node: mount -o remount,rw /sys/fs/bpf")
	e.wantService(t)
	e.run(t, "mount -o remount,bind,rw /sys/fs/bpf")
	e.restartAgent(t)
}

func readOnlyRun(t *testing.T, e *env) {
	e.run(t, "mount --bind /run/spillway /run/spillway && mount -o remount,bind,ro /run/spillway")
	e.restartAgent(t)
	e.wantLine(t, "status", "lock instance: open /run/spillway/", "read-only file system: mount /run/spillway writable on the node")
	e.wantService(t)
	e.run(t, "umount --lazy /run/spillway")
	e.restartAgent(t)
}

// missingCapability removes one from the DaemonSet, as an admission controller may do. With
// SYS_ADMIN the agent needs no other capability for eBPF.
func missingCapability(t *testing.T, e *env, name string) {
	e.changeCapabilities(t, func(list []string) []string {
		return slices.DeleteFunc(list, func(c string) bool { return c == name || c == "SYS_ADMIN" && name != "NET_ADMIN" })
	})
	line := map[string]string{
		"ebpf":     "eBPF dataplane needs CAP_" + name + ", which this process lacks: run as root, or add to the container's capabilities",
		"nftables": "nf_tables may not be used: ",
		"iptables": "load dataplane iptables: iptables needs CAP_" + name + ", which this process lacks: ",
	}[*proxyMode]
	e.wantLine(t, "status", line)
	e.wantService(t)
	e.kubectl(t, "--namespace", namespace, "rollout", "undo", "daemonset/spillway")
}

// seccompProfile allows everything but bpf(2).
const seccompProfile = `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["bpf"], "action": "SCMP_ACT_ERRNO"}]}`

func seccomp(t *testing.T, e *env) {
	for _, n := range e.AllNodes() {
		e.runOn(t, n, "mkdir -p /var/lib/kubelet/seccomp && echo '"+seccompProfile+"' >/var/lib/kubelet/seccomp/no-bpf.json")
	}
	e.upgrade(t, "seccompProfile.type=Localhost", "seccompProfile.localhostProfile=no-bpf.json")
	e.wantLine(t, "status", "eBPF dataplane needs bpf(2), which a seccomp profile or a security module denies: allow it, "+
		"in the chart with another seccompProfile, or with sysAdmin: true")
}

// Faults of the cluster.

const (
	crd      = "donottrackpolicies.policy.spillway.dev"
	crdNote  = "The CRD " + crd + " is missing or of another version, and Helm does not upgrade CRDs"
	crdInLog = "the CRD " + crd + " is not installed, or too old to serve v1alpha1; kubectl apply -f deploy/helm/spillway/crds"
)

func noCRD(t *testing.T, e *env) {
	e.kubectl(t, "delete", "crd", crd)
	e.upgradeWithNote(t, crdNote)
	e.restartAgent(t)
	e.wantLine(t, "log of the last node", "DoNotTrackPolicy is disabled", crdInLog)
	e.wantHealthy(t)
	e.applyCRD(t, nil)
	e.upgradeWithNote(t, "")
}

func oldCRDVersion(t *testing.T, e *env) {
	e.kubectl(t, "delete", "crd", crd)
	e.applyCRD(t, func(text string) string { return strings.Replace(text, "name: v1alpha1", "name: v1alpha0", 1) })
	e.upgradeWithNote(t, crdNote)
	e.restartAgent(t)
	e.wantLine(t, "log of the last node", "DoNotTrackPolicy is disabled", crdInLog)
	e.kubectl(t, "delete", "crd", crd)
	e.applyCRD(t, nil)
}

// policy lets nothing of the peers' port be tracked.
const policy = `
apiVersion: policy.spillway.dev/v1alpha1
kind: DoNotTrackPolicy
metadata: {name: peer}
spec:
  podSelector: {matchLabels: {app: peer}}
  ingress: [{ports: [{protocol: TCP, port: 8080}]}]
`

// oldCRDField removes the condition's reporter, which the first version of the CRD lacked.
func oldCRDField(t *testing.T, e *env) {
	e.kubectl(t, "delete", "crd", crd)
	e.applyCRD(t, func(text string) string {
		return strings.Replace(text, "reportingNodeName:", "formerName:", 1)
	})
	e.upgradeWithNote(t, crdNote)
	clustertest.Must(t, e.Apply(t.Context(), policy))
	e.kubectl(t, "wait", "donottrackpolicy/peer", "--for=condition=Applied", "--timeout=3m")
	e.wantService(t)
	e.kubectl(t, "delete", "donottrackpolicy/peer")
	e.applyCRD(t, nil)
	e.upgradeWithNote(t, "")
}

// applyCRD installs the chart's CRD, changed.
func (e *env) applyCRD(t *testing.T, change func(string) string) {
	t.Helper()
	text, err := e.Helm(t.Context(), "show", "crds", e.chart)
	clustertest.Must(t, err)
	if change != nil {
		changed := change(text)
		if changed == text {
			t.Fatal("the CRD does not have what is to change")
		}
		text = changed
	}
	clustertest.Must(t, e.Apply(t.Context(), text))
	e.kubectl(t, "wait", "crd/"+crd, "--for=condition=Established")
}

// start starts a cluster with peers, and a registry on each node.
func start(t *testing.T, cfg cluster.Config) *env {
	t.Helper()
	ctx := t.Context()
	root, err := programs.Root()
	clustertest.Must(t, err)
	cfg.Images, cfg.Values = []string{"agnhost"}, []string{"proxyMode=" + *proxyMode}
	c := clustertest.Start(t, "faults", cfg)
	e := &env{Cluster: c, chart: filepath.Join(root, "deploy/helm/spillway"), images: registry{filepath.Join(clustertest.Image(t), "image")}}
	for _, n := range c.AllNodes() {
		l, err := n.Host().Listen(ctx, "tcp", "127.0.0.1:5000")
		clustertest.Must(t, err)
		server := &http.Server{Handler: e.images}
		go func() { _ = server.Serve(l) }()
		t.Cleanup(func() { server.Close() })
	}
	clustertest.StartPeers(t, c, "peer", "")
	e.clusterIPs = strings.Fields(e.kubectl(t, "get", "service", "peer", "--output=jsonpath={.spec.clusterIPs[*]}"))
	for _, n := range c.AllNodes() { // which learn of the endpoints after the rollout
		for _, address := range n.Addresses() {
			url := "http://" + net.JoinHostPort(address.String(), nodePort)
			script := "until curl --silent --globoff --output /dev/null --max-time 1 '" + url + "'; do sleep 0.2; done"
			if out, err := c.Client().Command(ctx, "timeout", "60", "bash", "-c", script).CombinedOutput(); err != nil {
				t.Fatalf("wait for %s: %v: %s", url, err, out)
			}
		}
	}
	return e
}

// upgrade upgrades the release with more values, and does not wait.
func (e *env) upgrade(t *testing.T, values ...string) {
	t.Helper()
	args := []string{"upgrade", "spillway", e.chart, "--namespace", namespace, "--reuse-values"}
	for _, v := range values {
		args = append(args, "--set", v)
	}
	_, err := e.Helm(t.Context(), args...)
	clustertest.Must(t, err)
}

// upgradeWithNote upgrades the release without a change, and looks for a note, or for none
// about the CRD.
func (e *env) upgradeWithNote(t *testing.T, want string) {
	t.Helper()
	out, err := e.Helm(t.Context(), "upgrade", "spillway", e.chart, "--namespace", namespace, "--reuse-values")
	clustertest.Must(t, err)
	if !strings.Contains(out, want) || want == "" && strings.Contains(out, crd) {
		t.Errorf("helm upgrade prints %q, want %q", out, want)
	}
}

// fix installs the release as it was at first, and waits.
func (e *env) fix(t *testing.T) {
	t.Helper()
	clustertest.Must(t, e.InstallSpillway(t.Context(), e.Values...))
}

// wantHealthy fixes the release, and expects that Services were served before and are
// served after it.
func (e *env) wantHealthy(t *testing.T) {
	t.Helper()
	e.wantService(t)
	e.fix(t)
	e.wantService(t)
}

// changeCapabilities changes the agent's in the DaemonSet.
func (e *env) changeCapabilities(t *testing.T, change func([]string) []string) {
	t.Helper()
	const path = "/spec/template/spec/containers/0/securityContext/capabilities/add"
	var list []string
	out := e.kubectl(t, "--namespace", namespace, "get", "daemonset/spillway",
		"--output=jsonpath={.spec.template.spec.containers[0].securityContext.capabilities.add}")
	clustertest.Must(t, json.Unmarshal([]byte(out), &list))
	patch, err := json.Marshal([]map[string]any{{"op": "replace", "path": path, "value": change(list)}})
	clustertest.Must(t, err)
	e.kubectl(t, "--namespace", namespace, "patch", "daemonset/spillway", "--type=json", "--patch", string(patch))
}

// restartAgent deletes the agent's Pod on the last node.
func (e *env) restartAgent(t *testing.T) {
	t.Helper()
	e.kubectl(t, "--namespace", namespace, "delete", "pod", "--selector="+selector, "--field-selector=spec.nodeName="+e.Node(nodes-1).Name())
}

// run runs a script on the last node.
func (e *env) run(t *testing.T, script string) {
	t.Helper()
	e.runOn(t, e.Node(nodes-1), script)
}

func (e *env) runOn(t *testing.T, n *cluster.Node, script string) {
	t.Helper()
	if out, err := n.Command(t.Context(), "bash", "-euc", script).CombinedOutput(); err != nil {
		t.Fatalf("run %q on %s: %v: %s", script, n.Name(), err, out)
	}
}

func (e *env) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := e.Kubectl(t.Context(), args...)
	clustertest.Must(t, err)
	return out
}

// wantService asks the Service on every node.
func (e *env) wantService(t *testing.T) {
	t.Helper()
	for _, n := range e.AllNodes() {
		e.wantServiceAt(t, n)
	}
}

// wantServiceAt asks the Service on a node: its NodePort from outside, and the cluster IP
// from the node.
func (e *env) wantServiceAt(t *testing.T, n *cluster.Node) {
	t.Helper()
	ask(t, e.Client(), n.Host().IPv4.String(), nodePort)
	ask(t, n.Host(), e.clusterIPs[0], "80")
}

// ask asks the Service from a host.
func ask(t *testing.T, from *topology.Host, address, port string) (pods []string) {
	t.Helper()
	return asked(t, from.Name, address, port, func(argv ...string) ([]byte, error) {
		return from.Command(t.Context(), argv...).CombinedOutput()
	})
}

// asked asks more often than there are endpoints, and returns the Pods that answer.
func asked(t *testing.T, from, address, port string, run func(...string) ([]byte, error)) (pods []string) {
	t.Helper()
	url := "http://" + net.JoinHostPort(address, port) + "/hostname"
	for range 8 {
		out, err := run("curl", "--silent", "--show-error", "--globoff", "--max-time", "5", url)
		if err != nil || !strings.HasPrefix(string(out), "peer-") {
			t.Fatalf("%s from %s: %v: %s", url, from, err, out)
		}
		pods = append(pods, string(out))
	}
	slices.Sort(pods)
	return slices.Compact(pods)
}

// pod is what the test reads of a Pod.
type pod struct {
	Metadata struct{ Name string }
	Spec     struct{ NodeName string }
	Status   struct{ InitContainerStatuses, ContainerStatuses []containerStatus }
}

type containerStatus struct {
	ImageID          string
	State, LastState struct {
		Waiting, Terminated struct{ Reason, Message string }
	}
}

func (e *env) pods(t *testing.T) []pod {
	t.Helper()
	var list struct{ Items []pod }
	clustertest.Must(t, json.Unmarshal([]byte(e.kubectl(t, "--namespace", namespace, "get", "pods", "--selector="+selector, "--output=json")),
		&list))
	return list.Items
}

// lines returns what an operator sees of the agents: in the status of their Pods, in
// Events about them, or in their log.
func (e *env) lines(t *testing.T, where string) (out []string) {
	t.Helper()
	text := ""
	switch where {
	case "status":
		for _, p := range e.pods(t) {
			for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
				for _, one := range []string{s.State.Waiting.Message, s.State.Terminated.Message, s.LastState.Terminated.Message} {
					text += one + "\n"
				}
			}
		}
	case "event":
		text = e.kubectl(t, "--namespace", namespace, "get", "events", "--output=jsonpath={range .items[*]}{.message}{'\\n'}{end}")
	case "log", "log of the last node":
		for _, p := range e.pods(t) {
			if where != "log" && p.Spec.NodeName != e.Node(nodes-1).Name() {
				continue
			}
			some, _ := e.Kubectl(t.Context(), "--namespace", namespace, "logs", p.Metadata.Name) // it may not have started yet
			text += some
		}
	}
	for line := range strings.Lines(text) {
		out = append(out, strings.TrimSpace(line))
	}
	return out
}

// wantLine waits for one line with all parts.
func (e *env) wantLine(t *testing.T, where string, parts ...string) {
	t.Helper()
	var lines []string
	err := await.Error(func() error {
		lines = e.lines(t, where)
		i := slices.IndexFunc(lines, func(line string) bool {
			return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) })
		})
		if i >= 0 {
			t.Log(lines[i])
			return nil
		}
		return fmt.Errorf("%s has no line with %q:\n%s", where, parts, strings.Join(lines, "\n"))
	})
	if err == nil {
		return
	}
	out, _ := e.Kubectl(context.WithoutCancel(t.Context()), "--namespace", namespace, "get", "pods,events")
	t.Fatalf("%v\n%s", err, out)
}
