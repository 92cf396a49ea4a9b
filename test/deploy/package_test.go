package deploy

import (
	"bytes"
	"io"
	"log"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	oci "github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/registry"

	"spillway.dev/spillway/hack/image/chart"
)

// What a release publishes is the chart: Helm pulls it from a registry and renders the
// same manifests.
func TestHelmPullsThePackagedChart(t *testing.T) {
	dir := filepath.Join(root, "deploy", "helm", "spillway")
	archive, err := chart.Package(dir)
	if err != nil {
		t.Fatal(err)
	}
	artifact, err := chart.Artifact(dir, archive)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(oci.New(oci.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	ref := strings.TrimPrefix(server.URL, "http://") + "/charts/spillway:" + version(t)
	tag, err := name.NewTag(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(tag, artifact); err != nil {
		t.Fatal(err)
	}
	client, err := registry.NewClient(registry.ClientOptPlainHTTP(), registry.ClientOptWriter(io.Discard))
	if err != nil {
		t.Fatal(err)
	}
	pulled, err := client.Pull(ref)
	if err != nil {
		t.Fatal(err)
	}
	c, err := loader.LoadArchive(bytes.NewReader(pulled.Chart.Data))
	if err != nil {
		t.Fatal(err)
	}
	release := common.ReleaseOptions{Name: "spillway", Namespace: "kube-system"}
	values := map[string]any{
		"k8sServiceHost": "10.1.2.3", "dashboard": map[string]any{"enabled": true}, // a link in the directory
	}
	got, err := renderChart(c, release, values)
	if err != nil {
		t.Fatal(err)
	}
	want, err := renderChart(load(t), release, values)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Error(difference(want, got))
	}
	if len(c.CRDObjects()) == 0 {
		t.Error("the CRD is missing")
	}
}
