package await
