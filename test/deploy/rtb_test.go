package deploy

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
)

// The chart of examples/rtb, with the values that it has, is its manifest.
func TestTheExchangesChartIsItsManifest(t *testing.T) {
	c, err := loader.LoadDir(filepath.Join(root, "examples", "rtb", "chart"))
	if err != nil {
		t.Fatal(err)
	}
	renderRTB := func(values map[string]any) (string, error) {
		return renderChart(c, common.ReleaseOptions{Name: "rtb", Namespace: "default"}, values)
	}
	got, err := renderRTB(map[string]any{"image": "REGISTRY/rtb:TAG"})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(root, "examples", "rtb", "rtb.yaml")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(want, []byte(got)) {
		t.Errorf("examples/rtb/rtb.yaml is not what the chart makes (-update writes it anew): %v\n%s", err, got)
	}
	if _, err := renderRTB(nil); err == nil || !strings.Contains(err.Error(), "image: give") {
		t.Errorf("without an image: error %v", err)
	}
	if n := strings.Count(got, "topologySpreadConstraints"); n != 3 {
		t.Errorf("%d bidders, want 3", n)
	}
}
