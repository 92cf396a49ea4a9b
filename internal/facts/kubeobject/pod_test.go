package kubeobject

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestSocketHooksAnnotation(t *testing.T) {
	const hash = "d41d8cd98f00b204e9800998ecf8427e" // what the kubelet names a static pod by
	for name, test := range map[string]struct {
		annotations map[string]string
		uid         string
		problems    int
	}{
		"none":       {nil, "", 0},
		"on":         {map[string]string{SocketHooksAnnotation: "on"}, "", 0},
		"off":        {map[string]string{SocketHooksAnnotation: "off"}, "uid", 0},
		"unknown":    {map[string]string{SocketHooksAnnotation: "false"}, "", 1},
		"static pod": {map[string]string{SocketHooksAnnotation: "off", corev1.MirrorPodAnnotationKey: hash}, hash, 0},
		// Any author of a Pod may name another's.
		"UID of another pod": {map[string]string{SocketHooksAnnotation: "off",
			corev1.MirrorPodAnnotationKey: "5f3ecc28-1b3c-4c50-8f4b-9d3f4a6f2d11"}, "uid", 0},
		"no hash": {map[string]string{SocketHooksAnnotation: "off", corev1.MirrorPodAnnotationKey: "../" + hash[3:]}, "uid", 0},
	} {
		p, problems := Pod(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "p", UID: "uid", Annotations: test.annotations,
		}})
		if p == nil || p.UnhookedUID != test.uid || len(problems) != test.problems {
			t.Errorf("%s: %+v with problems %v, want UID %q and %d problems", name, p, problems, test.uid, test.problems)
		}
	}
}
