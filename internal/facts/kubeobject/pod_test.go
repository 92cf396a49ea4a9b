package kubeobject

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestSocketHooksAnnotation(t *testing.T) {
	for name, test := range map[string]struct {
		annotations map[string]string
		uid         string
		problems    int
	}{
		"none":       {nil, "", 0},
		"on":         {map[string]string{SocketHooksAnnotation: "on"}, "", 0},
		"off":        {map[string]string{SocketHooksAnnotation: "off"}, "uid", 0},
		"unknown":    {map[string]string{SocketHooksAnnotation: "false"}, "", 1},
		"static pod": {map[string]string{SocketHooksAnnotation: "off", corev1.MirrorPodAnnotationKey: "hash"}, "hash", 0},
	} {
		p, problems := Pod(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "p", UID: "uid", Annotations: test.annotations,
		}})
		if p == nil || p.UnhookedUID != test.uid || len(problems) != test.problems {
			t.Errorf("%s: %+v with problems %v, want UID %q and %d problems", name, p, problems, test.uid, test.problems)
		}
	}
}
