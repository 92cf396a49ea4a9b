package sysdump

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/nodeclient/nodeclienttest"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/diagnosis/sysdump"
)

// execute runs a command line as the program does.
func execute(args []string, stdout, stderr io.Writer) int {
	return cli.Program{Name: "spillway", Commands: []*cobra.Command{NewCommand()}}.Run(args, stdout, stderr)
}

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// planted is in every secret of the test.
const planted = "PLANT"

var privateKey = "-----BEGIN RSA PRIVATE KEY-----\n" + planted + "07abc\n" + planted + "08def\n-----END RSA PRIVATE KEY-----"

// jwt has the secret in base64, which the test looks for as well.
var jwt = "eyJhbGciOiJSUzI1NiJ9." + base64.RawURLEncoding.EncodeToString([]byte(planted)) + ".c2lnbmF0dXJl"

// logText has secrets in the forms that logs have them.
var logText = strings.Join([]string{
	`time=2026-11-23 level=INFO msg="first sync done" ports=5`,
	`Authorization: Bearer ` + planted + `.03.xyz`,
	`msg="push failed" url=http://admin:` + planted + `04@influx:8086/write`,
	`msg="request" token=` + planted + `05 password: "` + planted + ` 06"`,
	`{"headers":"{\"api-key\":\"` + planted + `09\"}"}`,
	`jwt ` + jwt,
	`from the environment of the agent: ` + planted + `-environment`,
	`from the file of a token: ` + planted + `-token-file`,
	`from the files of keys: ` + planted + `-seed-file ` + planted + `-key-file ` + planted + `-previous-key`,
	`from the kubeconfig: ` + planted + `-kubeconfig`,
	privateKey,
	`the last line`,
}, "\n") + "\n"

// plantNode plants secrets on the node: in the agent's command line, environment, files and
// log, and in its metrics.
func plantNode(t *testing.T) (args []string) {
	dir := t.TempDir()
	before := [2]string{procDir, logDir}
	procDir, logDir = filepath.Join(dir, "proc"), filepath.Join(dir, "logs")
	t.Cleanup(func() { procDir, logDir = before[0], before[1] })
	agent := []string{
		"/usr/bin/spillway", "agent", "--influx-url=http://admin:" + planted + "01@influx/", "--some-token", planted + "02",
		"--influx-token-file=/secret/token", "--maglev-seed-file", "/secret/seed", "--dsr-key-file=/secret/keys", "--proxy-mode", "ebpf",
	}
	plantProcess(t, "7", agent)
	write(t, filepath.Join(procDir, "7", "environ"), "PATH=/bin\x00INFLUX_TOKEN="+planted+"-environment\x00")
	write(t, filepath.Join(procDir, "7", "root", "secret", "token"), planted+"-token-file\n")
	write(t, filepath.Join(procDir, "7", "root", "secret", "..data", "seed"), planted+"-seed-file\n")
	if err := os.Symlink("..data/seed", filepath.Join(procDir, "7", "root", "secret", "seed")); err != nil { // as the kubelet does
		t.Fatal(err)
	}
	write(t, filepath.Join(procDir, "7", "root", "secret", "keys"), planted+"-key-file\n"+planted+"-previous-key\n")
	plantProcess(t, "8", []string{"/usr/bin/other", "agent", planted})
	write(t, filepath.Join(procDir, "sys", "net", "netfilter", "nf_conntrack_max"), "262144\n")
	write(t, filepath.Join(logDir, "kube-system_spillway-x_uid", "agent", "0.log"), logText)
	t.Setenv("MY_PASSWORD", planted+"-own-environment")
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/healthz" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		fmt.Fprintf(w, "good_metric 1\ninfo{url=\"http://u:%[1]s10@h/\",x=\"%[1]s-own-environment\"} 1\n", planted)
	}))
	t.Cleanup(page.Close)
	address := strings.TrimPrefix(page.URL, "http://")
	return []string{"--metrics-address", address, "--healthz-address", address, "--bpffs", filepath.Join(dir, "bpf"), "--api-socket",
		nodeclienttest.Serve(t, agentAPI{})}
}

// plantProcess makes the files of a process of root in procDir.
func plantProcess(t *testing.T, pid string, args []string) (dir string) {
	t.Helper()
	dir = filepath.Join(procDir, pid)
	write(t, filepath.Join(dir, "cmdline"), strings.Join(args, "\x00")+"\x00")
	write(t, filepath.Join(dir, "status"), "Name:\tspillway\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n")
	if err := os.Symlink(args[0], filepath.Join(dir, "exe")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// agentAPI is an agent whose state has secrets.
type agentAPI struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
}

func (agentAPI) Status(context.Context, *nodev1alpha1.StatusRequest) (*nodev1alpha1.StatusResponse, error) {
	return &nodev1alpha1.StatusResponse{Node: "node-a", Problems: []*nodev1alpha1.Problem{
		{Where: "influx", What: "post http://admin:" + planted + "30@influx:8086/write: password=" + planted + "31"},
		{Where: "collector", What: "refused " + planted + "-token-file, " + planted + "-environment and " + planted + "-kubeconfig"},
	}}, nil
}

func (agentAPI) Drops(context.Context, *nodev1alpha1.DropsRequest) (*nodev1alpha1.DropsResponse, error) {
	return &nodev1alpha1.DropsResponse{Drops: []*nodev1alpha1.Drop{{Reason: "rejected_rst", Meaning: "token: " + planted + "32", Packets: 7}}},
		nil
}

func (agentAPI) Findings(context.Context, *nodev1alpha1.FindingsRequest) (*nodev1alpha1.FindingsResponse, error) {
	return &nodev1alpha1.FindingsResponse{Findings: []*nodev1alpha1.Finding{{
		Id: "endpoints-unreachable", Evidence: []string{"Authorization: Bearer " + planted + ".33", privateKey},
		Commands: []string{"curl --token " + planted + "34 " + jwt},
	}}}, nil
}

func (agentAPI) ListFlows(context.Context, *nodev1alpha1.ListFlowsRequest) (*nodev1alpha1.ListFlowsResponse, error) {
	return &nodev1alpha1.ListFlowsResponse{Flows: []*nodev1alpha1.Flow{{Service: "web", State: planted + "-environment"}, {Service: "db"}}},
		nil
}

func (agentAPI) ListServices(_ context.Context, req *nodev1alpha1.ListServicesRequest) (*nodev1alpha1.ListServicesResponse, error) {
	if req.PageToken == "" {
		return &nodev1alpha1.ListServicesResponse{Services: []*nodev1alpha1.Service{{Name: "web"}}, NextPageToken: "2"}, nil
	}
	return &nodev1alpha1.ListServicesResponse{Services: []*nodev1alpha1.Service{{Name: "db",
		Problems: []*nodev1alpha1.Problem{{What: "password=" + planted + "35"}}}}}, nil
}

// serveExec is api-pipe in an agent's Pod, over a WebSocket.
func serveExec(w http.ResponseWriter, r *http.Request, socket string) {
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{remotecommand.StreamProtocolV5Name: {
		Binary: true,
		Channels: []wsstream.ChannelType{wsstream.ReadChannel, wsstream.WriteChannel, wsstream.WriteChannel,
			wsstream.WriteChannel, wsstream.ReadChannel},
	}})
	conn.SetIdleTimeout(time.Minute)
	// The end of a connection is no error here.
	_, streams, err := conn.Open(w, r.WithContext(klog.NewContext(r.Context(), logr.Discard())))
	if err != nil {
		return
	}
	defer conn.Close()
	_ = reach.Pipe(r.Context(), nodeclient.Unix(socket).Dial, streams[0], streams[1])
	_ = json.NewEncoder(streams[3]).Encode(metav1.Status{Status: metav1.StatusSuccess})
}

// apiServer is one whose objects have secrets. Requests without the kubeconfig's token fail.
func apiServer(t *testing.T) (kubeconfig string) {
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{
			Name: name, Namespace: "kube-system", Annotations: map[string]string{"last-applied": planted + "20"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: planted + "21"}},
		}
	}
	probe := &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{HTTPHeaders: []corev1.HTTPHeader{{Name: "X",
		Value: planted + "22"}}}}}
	set := appsv1.DaemonSet{ObjectMeta: meta("spillway")}
	set.UID = "set"
	set.Spec.Template.Spec = corev1.PodSpec{HostNetwork: true, Containers: []corev1.Container{{Name: "agent", Image: "spillway:1"}}}
	podMeta := meta("spillway-x")
	podMeta.UID = "uid"
	podMeta.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(&set, appsv1.SchemeGroupVersion.WithKind("DaemonSet"))}
	objects := map[string]any{
		"/version":      map[string]string{"gitVersion": "v1.36.3"},
		"/api/v1/nodes": corev1.NodeList{Items: []corev1.Node{{ObjectMeta: meta("node-a")}}},
		"/apis/apps/v1/namespaces/kube-system/daemonsets": appsv1.DaemonSetList{Items: []appsv1.DaemonSet{set}},
		"/api/v1/namespaces/kube-system/pods": corev1.PodList{Items: []corev1.Pod{{
			ObjectMeta: podMeta,
			Spec: corev1.PodSpec{HostNetwork: true, NodeName: "node-a", Containers: []corev1.Container{{
				Name: "agent", Image: "spillway:1", Env: []corev1.EnvVar{{Name: "GREETING", Value: planted + "23"}}, LivenessProbe: probe,
				ReadinessProbe: probe, StartupProbe: probe,
				Args: []string{"agent", "--token", planted + "24", "--influx-url=http://u:" + planted + "25@h/"},
			}}},
			Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "agent", RestartCount: 1,
				State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}},
		}, {ObjectMeta: meta("spillway-label"), Spec: corev1.PodSpec{NodeName: "node-b"}}}},
		"/api/v1/events": corev1.EventList{Items: []corev1.Event{
			{ObjectMeta: meta("one"), ReportingController: "spillway",
				Message: "good message, secret: " + planted + "26, " + planted + "-kubeconfig"},
			{ObjectMeta: meta("other"), ReportingController: "kubelet", Message: planted + "27"},
		}},
		"/api/v1/services": corev1.ServiceList{Items: []corev1.Service{{ObjectMeta: meta("web")}}},
		"/apis/discovery.k8s.io/v1/endpointslices": discoveryv1.EndpointSliceList{
			Items: []discoveryv1.EndpointSlice{{ObjectMeta: meta("web-1")}}},
	}
	socket := nodeclienttest.Serve(t, agentAPI{})
	// client-go sends a token by TLS alone.
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/pods/spillway-x/log") {
			fmt.Fprint(w, logText)
			return
		}
		if strings.HasSuffix(r.URL.Path, "/pods/spillway-x/exec") {
			serveExec(w, r, socket)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		object, ok := objects[r.URL.Path]
		if !ok || r.Header.Get("Authorization") != "Bearer "+planted+"-kubeconfig" {
			http.Error(w, "refused: token="+planted+"28", http.StatusForbidden)
			return
		}
		_ = json.NewEncoder(w).Encode(object)
	}))
	t.Cleanup(server.Close)
	return write(t, filepath.Join(t.TempDir(), "kubeconfig"), fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %s-kubeconfig}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, server.URL, planted))
}

// read returns the files of an archive, without the directory in it.
func read(t *testing.T, file string) map[string]string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	packed, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(packed); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		_, name, _ := strings.Cut(header.Name, "/")
		files[name] = string(text)
	}
}

func TestNoSecretIsInTheArchive(t *testing.T) {
	args := plantNode(t)
	file := filepath.Join(t.TempDir(), "dump.tar.gz")
	args = append([]string{"sysdump", "--objects", "--file", file, "--kubeconfig", apiServer(t)}, args...)
	var out, errs bytes.Buffer
	if code := execute(args, &out, &errs); code != cli.ExitDone {
		t.Fatalf("exit code %d: %s", code, &errs)
	}
	files := read(t, file)
	encoded := regexp.MustCompile(planted + "|" + base64.RawURLEncoding.EncodeToString([]byte(planted)))
	for name, text := range files {
		for line := range strings.Lines(text) {
			if encoded.MatchString(line) {
				t.Errorf("%s has a secret: %s", name, line)
			}
		}
		if strings.HasSuffix(name, ".json") && !json.Valid([]byte(text)) {
			t.Errorf("%s is not JSON any more: %s", name, text)
		}
	}
	if encoded.MatchString(out.String() + errs.String()) {
		t.Errorf("the output has a secret: %s%s", &out, &errs)
	}
	var index sysdump.Index
	if err := json.Unmarshal([]byte(files["index.json"]), &index); err != nil {
		t.Fatal(err)
	}
	for _, e := range index.Files {
		if strings.Contains(e.File, "node-b") {
			t.Errorf("%s is of a Pod that is no agent", e.File)
		}
		if want := "Pod spillway-label has the agents' label but is no agent: no DaemonSet owns it"; e.File == "cluster/agents.json" &&
			!strings.Contains(e.Error, want) {
			t.Errorf("%s: %q, want %q", e.File, e.Error, want)
		}
		if strings.Contains(e.File, "/api/") || strings.HasPrefix(e.File, agentFilePart) {
			if e.Error != "" {
				t.Errorf("%s: %s", e.File, e.Error)
			}
		}
	}
	// What is no secret is there.
	for _, dir := range []string{"node/api/", "cluster/agents/node-a/"} {
		for name, want := range map[string]string{
			"status.json": `"node": "node-a"`, "drops.json": `"rejected_rst"`, "findings.json": `"endpoints-unreachable"`,
			"flows.jsonl": `"service":"db"`, "services.jsonl": `"name":"db"`,
		} {
			if !strings.Contains(files[dir+name], want) {
				t.Errorf("%s%s lacks %q: %q", dir, name, want, files[dir+name])
			}
		}
		for _, name := range []string{"flows.jsonl", "services.jsonl"} {
			for line := range strings.Lines(files[dir+name]) {
				if !json.Valid([]byte(line)) {
					t.Errorf("%s%s: a line is not JSON: %s", dir, name, line)
				}
			}
		}
	}
	if strings.Contains(files["cluster/agents.json"], "spillway-label") {
		t.Error("cluster/agents.json has a Pod that is no agent")
	}
	for name, want := range map[string]string{
		"node/agents.json":                   `"--proxy-mode"`,
		"node/metrics.txt":                   "good_metric 1",
		"node/healthz.txt":                   "good_metric 1",
		"node/sysctls.txt":                   "net/netfilter/nf_conntrack_max = 262144",
		"node/agent.log":                     "the last line",
		"node/version.json":                  `"goVersion"`,
		"cluster/version.json":               "v1.36.3",
		"cluster/nodes.json":                 "node-a",
		"cluster/agents.json":                `"GREETING"`,
		"cluster/events.json":                "good message",
		"cluster/counts.json":                `"endpointSlices": 1`,
		"cluster/services.jsonl":             `"web"`,
		"cluster/endpointslices.jsonl":       `"web-1"`,
		"cluster/agents/node-a.log":          "the last line",
		"cluster/agents/node-a-previous.log": "first sync done",
	} {
		if !strings.Contains(files[name], want) {
			t.Errorf("%s lacks %q: %q", name, want, files[name])
		}
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if out.Reset(); execute(args, &out, &errs) != cli.ExitFailed ||
		!strings.Contains(errs.String(), "exists: remove it, or give another --file") {
		t.Errorf("a second archive: %s", &errs)
	}
}

// Without rights, an agent or a cluster, the archive says what is missing.
func TestAnArchiveWithoutAnything(t *testing.T) {
	plantNode(t)
	procDir, logDir = t.TempDir(), t.TempDir()
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("HOME", t.TempDir())
	file := filepath.Join(t.TempDir(), "dump.tar.gz")
	var out, errs bytes.Buffer
	args := []string{"sysdump", "--file", file, "--metrics-address", "127.0.0.1:1", "--healthz-address", "127.0.0.1:1", "--bpffs", t.TempDir(),
		"--api-socket", filepath.Join(t.TempDir(), "none"), "-o", "json"}
	if code := execute(args, &out, &errs); code != cli.ExitDone {
		t.Fatalf("exit code %d: %s", code, &errs)
	}
	var printed result
	if err := json.Unmarshal(out.Bytes(), &printed); err != nil {
		t.Fatal(err)
	}
	var index sysdump.Index
	if err := json.Unmarshal([]byte(read(t, file)["index.json"]), &index); err != nil || len(index.Files) != len(printed.Index.Files) {
		t.Fatalf("%v, %+v", err, index)
	}
	for _, name := range []string{"node/agents.json", "node/metrics.txt", "node/agent.log", "node/maps/flows.jsonl",
		"node/api/status.json", "cluster"} {
		i := slices.IndexFunc(index.Files, func(e sysdump.Entry) bool { return e.File == name })
		if i < 0 || index.Files[i].Error == "" {
			t.Errorf("%s: %+v", name, index.Files)
		}
	}
}

func TestWrongUsage(t *testing.T) {
	for _, row := range []struct{ line, want string }{
		{"--node=false --cluster=false", "--node=false --cluster=false: nothing is left to collect"},
		{"--objects --cluster=false", "--objects --cluster=false: objects are the cluster's"},
		{"--max-size 0", "--max-size 0: use 1 to 1024"},
		{"--file=", "--file: a value is empty"},
		{"--agent-namespace=", "--agent-namespace: a value is empty"},
	} {
		var out, errs bytes.Buffer
		if code := execute(append([]string{"sysdump"}, strings.Fields(row.line)...), &out, &errs); code != cli.ExitUsage ||
			errs.String() != "spillway: "+row.want+"\n" {
			t.Errorf("%s: exit code %d: %q", row.line, code, &errs)
		}
	}
	var out, errs bytes.Buffer
	missing := filepath.Join(t.TempDir(), "no", "file")
	if code := execute([]string{"sysdump", "--cluster=false", "--file", missing}, &out, &errs); code != cli.ExitFailed ||
		!strings.HasPrefix(errs.String(), "spillway: collecting\nspillway: write archive: open "+missing) {
		t.Errorf("exit code %d: %q", code, &errs)
	}
}

func TestPages(t *testing.T) {
	clitest.Pages(t, "result", &result{File: "spillway sysdump.tar.gz", Bytes: 92 << 10, Index: &sysdump.Index{Files: []sysdump.Entry{
		{File: "node/version.json", About: "versions of spillway and of the kernel", Bytes: 512},
		{File: "node/metrics.txt", About: "the agent's metrics",
			Error: `Get "http://127.0.0.1:10249/metrics": dial tcp 127.0.0.1:10249: connect: connection refused`},
		{File: "node/maps/unconfirmed_next.jsonl", About: "eBPF map unconfirmed_next, at most 5000 entries", Bytes: 2 << 20, Cut: true},
		{File: "cluster/agents/node-a.log", About: "end of the agent's log on node-a", Bytes: 12345, Error: "not done after 20s"},
	}}})
}

func TestATailBeginsWithALine(t *testing.T) {
	file := write(t, filepath.Join(t.TempDir(), "log"), "first line\nsecond line\nthird line\n")
	for size, want := range map[int64]string{100: "first line\nsecond line\nthird line\n", 20: "third line\n"} {
		var out bytes.Buffer
		if err := tail(&out, file, size); err != nil || out.String() != want {
			t.Errorf("%d bytes: %q, %v", size, &out, err)
		}
	}
}

// A Pod of another namespace may have any name. The kubelet writes the namespace and the UID.
func TestLogsOfPodsThatAreNoAgents(t *testing.T) {
	n := &node{logs: t.TempDir(), agentNamespace: "proxy"}
	for _, pod := range []string{"proxy_spillway-abcde_1", "proxy_spillway-other_2", "proxy_coredns_3", "tenant_spillway-zzzzz_4",
		"tenant_proxy-spillway_5"} {
		write(t, filepath.Join(n.logs, pod, "agent", "0.log"), pod+"\n")
	}
	found := &reach.Pods{Namespace: "proxy", Agents: []*corev1.Pod{{ObjectMeta: metav1.ObjectMeta{UID: "1"}},
		{ObjectMeta: metav1.ObjectMeta{UID: "of another node"}}}}
	for _, c := range []struct {
		name string
		pods func(context.Context) (*reach.Pods, error)
		how  string
		want []string
	}{
		{"by their UIDs", func(context.Context) (*reach.Pods, error) { return found, nil },
			"# Pods of the agents' DaemonSet in namespace proxy", []string{"proxy_spillway-abcde_1"}},
		{"without an API server", nil,
			"# Pods of namespace proxy by their names", []string{"proxy_spillway-abcde_1", "proxy_spillway-other_2"}},
		{"without rights", func(context.Context) (*reach.Pods, error) { return nil, errors.New("you may not") },
			"# Pods of namespace proxy by their names: you may not", []string{"proxy_spillway-abcde_1", "proxy_spillway-other_2"}},
	} {
		n.pods = c.pods
		want := c.how + "\n"
		for _, pod := range c.want {
			want += "# " + filepath.Join(n.logs, pod, "agent", "0.log") + "\n" + pod + "\n"
		}
		var out bytes.Buffer
		if err := n.agentLogs(t.Context(), &out); err != nil || out.String() != want {
			t.Errorf("%s: %v\n%s\nwant\n%s", c.name, err, &out, want)
		}
	}
	found.Agents = nil
	n.pods = func(context.Context) (*reach.Pods, error) { return found, nil }
	if err := n.agentLogs(t.Context(), io.Discard); !errors.Is(err, os.ErrNotExist) ||
		!strings.Contains(err.Error(), "Pods of the agents' DaemonSet in namespace proxy") {
		t.Errorf("no agent on this node: %v", err)
	}
}
