package await

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestErrorRepeatsUntilNil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		at := began.Add(Limit - time.Second)
		if err := Error(func() error {
			if time.Now().Before(at) {
				return errors.New("too early")
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		broken := errors.New("broken")
		err := Error(func() error { return broken })
		if !errors.Is(err, broken) || !strings.Contains(err.Error(), "not after 3m0s") {
			t.Errorf("error %v", err)
		}
	})
}
