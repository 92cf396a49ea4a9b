package controlplane

import (
	"bytes"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
)

// manifest reads the rendered manifest of test/deploy, object by object.
func manifest(t *testing.T, name string) (objects [][]byte) {
	t.Helper()
	text := must[[]byte](t)(os.ReadFile(filepath.Join("..", "deploy", "testdata", name+".yaml")))
	for doc := range bytes.SplitSeq(text, []byte("---\n")) {
		if len(bytes.TrimSpace(doc)) > 0 {
			objects = append(objects, must[[]byte](t)(utilyaml.ToJSON(doc)))
		}
	}
	return objects
}

// find decodes the first object of a type.
func find[T runtime.Object](t *testing.T, objects [][]byte) T {
	t.Helper()
	var none T
	for _, doc := range objects {
		if o, _, err := scheme.Codecs.UniversalDeserializer().Decode(doc, nil, nil); err == nil {
			if v, ok := o.(T); ok {
				return v
			}
		}
	}
	t.Fatalf("no %T is rendered", none)
	return none
}

// box creates a container without an engine. The root of its own, /proc/sys and /sys are
// read-only, as runtimes mount them. It has the volumes of the Pod, and its own
// capabilities only. It lacks a PID namespace, seccomp and AppArmor. Arguments: root,
// capabilities, number of mounts, each mount as SOURCE TARGET ro|rw, then the command.
const box = `
root=$1 caps=$2 mounts=$3; shift 3
mount -t tmpfs box "$root"
for d in /usr /bin /sbin /lib /lib64 /etc; do
  if [ $d = /lib ]; then # volumes are mounted below it
    mkdir "$root/lib"; ln -s /usr/lib/* "$root/lib"; rm -f "$root/lib/modules"
  elif [ -L $d ]; then cp -a $d "$root$d"
  elif [ -d $d ]; then mkdir "$root$d"; mount --bind $d "$root$d"; mount -o remount,bind,ro "$root$d"; fi
done
mkdir "$root/proc" "$root/sys" "$root/dev"
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
touch "$root/dev/null"; mount --bind /dev/null "$root/dev/null"
while [ $mounts -gt 0 ]; do
  if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$(dirname "$root$2")"; touch "$root$2"; fi
  mount --bind "$1" "$root$2"
  if [ "$3" = ro ]; then mount -o remount,bind,ro "$root$2"; fi
  mounts=$((mounts-1)); shift 3
done
mount -o remount,ro "$root"
exec chroot "$root" setpriv --bounding-set="$caps" --inh-caps=-all --no-new-privs "$@"
`

// secrets is the directory of a Pod's account.
const secrets = "/var/run/secrets/kubernetes.io/serviceaccount"

// contain makes start run the agent as a rendered DaemonSet specifies, with the lab's
// paths in place of a node's.
func (n *node) contain(objects [][]byte, token string) {
	n.t.Helper()
	pod := find[*appsv1.DaemonSet](n.t, objects).Spec.Template.Spec
	agent := pod.Containers[0]
	account := n.place("account", map[string]string{"token": token, "ca.crt": string(n.cp.REST().CAData)})
	places := map[string]string{
		"/sys/fs/bpf":       filepath.Join(n.dir, "bpf"),
		"/sys/fs/cgroup":    n.host.CgroupRoot,
		"/run/spillway":     n.place("run", nil),
		"/run/xtables.lock": filepath.Join(n.place("locks", map[string]string{"xtables.lock": ""}), "xtables.lock"),
		"/lib/modules":      n.place("modules", nil),
		"/run/netns":        n.place("netns", nil),
	}
	mounts := []string{must[string](n.t)(binary()), "/spillway", "ro", account, secrets, "ro"}
	for _, m := range agent.VolumeMounts {
		v := pod.Volumes[slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })]
		source := places[v.HostPath.Path]
		if source == "" {
			n.t.Fatalf("the chart mounts %s: of which place of the lab is that?", v.HostPath.Path)
		}
		how := map[bool]string{true: "ro", false: "rw"}[m.ReadOnly]
		mounts = append(mounts, source, m.MountPath, how)
	}
	n.argv = slices.Concat([]string{"unshare", "--mount", "--propagation", "private", "sh", "-euc", box, "box",
		n.place("root", nil), boundingSet(agent.SecurityContext), strconv.Itoa(len(mounts) / 3)}, mounts, []string{"/spillway"})
	for _, arg := range agent.Args {
		n.argv = append(n.argv, strings.ReplaceAll(arg, "$(NODE_NAME)", n.host.Name))
	}
	n.env = append([]string{"PATH=" + os.Getenv("PATH")}, n.apiServerVariables(agent.Env)...)
}

// A kube-proxy has all capabilities. The kernel hides the link /proc/PID/ns/net of such a
// process from a process with fewer (ptrace(2), access mode checking). The agent finds it
// by files that need no SYS_PTRACE.
func TestTheChartLetsAnAgentThatTakesOverSeeAKubeProxy(t *testing.T) {
	pod := find[*appsv1.DaemonSet](t, manifest(t, "replace")).Spec.Template.Spec
	if !pod.HostPID {
		t.Error("the Pod does not see the node's processes")
	}
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "kube-proxy")
	if err := os.Symlink(sleep, program); err != nil { // the kernel names a process after the path
		t.Fatal(err)
	}
	n := newNode(t)
	proxy := n.host.Command(t.Context(), program, "600")
	if err := proxy.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = proxy.Process.Kill()
		_ = proxy.Wait()
	})
	objects := manifest(t, "replace")
	n.contain(objects, n.install(objects))
	n.argv = slices.DeleteFunc(n.argv, func(arg string) bool { // flags for parts that this node lacks
		return strings.HasPrefix(arg, "--detect-local-mode") || strings.HasPrefix(arg, "--pod-bridge-interface") ||
			strings.HasPrefix(arg, "--healthz-bind-address") || strings.HasPrefix(arg, "--conntrack") || strings.HasPrefix(arg, "--log-format")
	})
	n.start()
	n.until("a line about the process", func() bool { return n.says(fmt.Sprintf("process %d", proxy.Process.Pid)) })
	for _, line := range slices.Concat(n.lines("permission denied"), n.lines("not permitted")) {
		// A security module of the kernel may refuse these programs whatever the rights.
		if !strings.Contains(line, "iterate sockets by eBPF: load program: operation not permitted") {
			t.Errorf("the agent lacks a right: %s", line)
		}
	}
}

// place creates a directory for this node with files in it.
func (n *node) place(name string, files map[string]string) string {
	n.t.Helper()
	dir := filepath.Join(n.dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		n.t.Fatal(err)
	}
	for file, text := range files {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			n.t.Fatal(err)
		}
	}
	return dir
}

// boundingSet writes a container's capabilities as setpriv(1) wants them.
func boundingSet(c *corev1.SecurityContext) string {
	set := "-all"
	for _, name := range c.Capabilities.Add {
		set += ",+" + strings.ToLower(string(name))
	}
	return set
}

// apiServerVariables returns the environment variables that give the agent the address
// of the API server, with the lab's address in place of the rendered one.
func (n *node) apiServerVariables(rendered []corev1.EnvVar) (env []string) {
	n.t.Helper()
	server := must[*url.URL](n.t)(url.Parse(n.cp.Server()))
	for name, value := range map[string]string{"KUBERNETES_SERVICE_HOST": server.Hostname(), "KUBERNETES_SERVICE_PORT": server.Port()} {
		if !slices.ContainsFunc(rendered, func(e corev1.EnvVar) bool { return e.Name == name }) {
			n.t.Fatalf("the chart does not set %s", name)
		}
		env = append(env, name+"="+value)
	}
	return env
}
