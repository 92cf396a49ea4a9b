package deploy

import (
	"bytes"
	"encoding/base64"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	helmcontroller "github.com/k3s-io/helm-controller/pkg/apis/helm.cattle.io/v1"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"
	"sigs.k8s.io/yaml"
)

// The play runs on a stand-in for a machine of k3s (testdata/k3s-stand-in.sh says what
// that is): what it writes is what k3s asks for, each service is restarted once, and
// a second run changes nothing.
func TestThePlayWritesWhatK3sReads(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: needs Ansible")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts over /etc and /var/lib in a namespace")
	}
	results := t.TempDir()
	path := func(name string) string { return filepath.Join(results, name) }
	packed, err := chartutil.Save(load(t), results)
	if err != nil {
		t.Fatal(err)
	}
	image := bytes.Repeat([]byte("layer"), 1000)
	if err := os.WriteFile(path("spillway.tar"), image, 0o600); err != nil {
		t.Fatal(err)
	}
	play, err := filepath.Abs(filepath.Join(root, "deploy/ansible/k3s.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	script, err := filepath.Abs("testdata/k3s-stand-in.sh")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private",
		script, play, packed, path("spillway.tar"), results)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("run the play: %v\n%s", err, out)
	}
	said := func(name string) string {
		t.Helper()
		text, err := os.ReadFile(path(name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}

	if got, want := said("config.yaml"), "# by hand\nflannel-backend: host-gw\ndisable-kube-proxy: true\n"; got != want {
		t.Errorf("k3s's configuration is %q, want %q", got, want)
	}
	if said("image.tar") != string(image) {
		t.Error("the image is not where k3s imports it")
	}
	if got := said("first.restarts"); got != "k3s\nk3s-agent\n" {
		t.Errorf("restarted were %q, want k3s and then its agent", got)
	}
	if said("second.restarts") != said("first.restarts") {
		t.Errorf("a second run restarts again: %q", said("second.restarts"))
	}
	if n := len(regexp.MustCompile(`changed=0 `).FindAllString(said("second.log"), -1)); n != 2 {
		t.Errorf("a second run changes something:\n%s", said("second.log"))
	}
	wantHelmChart(t, said("manifest.yaml"), said(filepath.Base(packed)))
}

// wantHelmChart wants a HelmChart that brings the packed chart, with values that it
// takes.
func wantHelmChart(t *testing.T, manifest, packed string) {
	t.Helper()
	var m helmcontroller.HelmChart // of the program that k3s runs
	if err := yaml.UnmarshalStrict([]byte(manifest), &m); err != nil {
		t.Fatal(err)
	}
	if m.APIVersion != "helm.cattle.io/v1" || m.Kind != "HelmChart" || m.Name != "spillway" ||
		m.Namespace != "kube-system" || m.Spec.TargetNamespace != "kube-system" || !m.Spec.Bootstrap {
		t.Errorf("the manifest is %.300s", manifest)
	}
	archive, err := base64.StdEncoding.DecodeString(m.Spec.ChartContent)
	if err != nil || string(archive) != packed {
		t.Fatalf("the manifest's chart is not the one that was given (%v)", err)
	}
	c, err := loader.LoadArchive(bytes.NewReader(archive))
	if err != nil || c.Name() != "spillway" || len(c.Templates) != len(load(t).Templates) {
		t.Fatalf("the manifest's chart cannot be read (%v)", err)
	}
	out, err := render(t, m.Spec.ValuesContent)
	if err != nil {
		t.Fatalf("the chart does not take the manifest's values: %v", err)
	}
	for _, want := range []string{
		"--takeover=kube-proxy", "image: docker.io/library/spillway:" + version(t), `value: "127.0.0.1"`, `value: "6444"`,
	} {
		if !strings.Contains(out, want) {
			t.Errorf("what k3s would apply lacks %q", want)
		}
	}
}
