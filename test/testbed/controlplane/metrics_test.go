package controlplane

import "testing"

func TestMetricsAreRead(t *testing.T) {
	got, ok := parseSample(`apiserver_longrunning_requests{resource="pods",verb="WATCH"} 1.2e+01`)
	if !ok || got.name != "apiserver_longrunning_requests" || got.labels["resource"] != "pods" ||
		got.labels["verb"] != "WATCH" || got.value != 12 {
		t.Errorf("parsed %+v", got)
	}
	for _, line := range []string{"", "# HELP x y", "go_threads 12"} {
		if _, ok := parseSample(line); ok {
			t.Errorf("%q is a sample with labels", line)
		}
	}
}
