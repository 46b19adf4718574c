; Generated from breakpoint.c by `make runtime`.
; 58f13b0d6252d9e539702d0ff96f9e7f7242b55555184da110c3f4bc59b5b02b
%struct.entry = type { i64, i64 }
define dso_local i32 @notify(ptr %block, i64 %action, ptr %args) #0 {
entry:
  %0 = load i64, ptr @trap_action, align 8
  %cmp.not = icmp eq i64 %action, %0
  br i1 %cmp.not, label %if.end, label %return
if.end:
  %1 = load ptr, ptr %args, align 8
  %2 = load i64, ptr @ip_offset, align 8
  %add.ptr = getelementptr inbounds i8, ptr %1, i64 %2
  %3 = load i64, ptr %add.ptr, align 8
  %sub = add i64 %3, -1
  %cmp2 = icmp sgt i64 %sub, -1
  br i1 %cmp2, label %return, label %if.end4
if.end4:
  %mul = mul i64 %sub, -7046029254386353131
  %shr = lshr i64 %mul, 40
  br label %do.body
do.body:
  %n.0 = phi i64 [ %shr, %if.end4 ], [ %inc, %do.cond ]
  %table = getelementptr inbounds nuw i8, ptr %block, i64 24
  %4 = load ptr, ptr %table, align 8
  %inc = add i64 %n.0, 1
  %mask = getelementptr inbounds nuw i8, ptr %block, i64 32
  %5 = load i64, ptr %mask, align 8
  %and = and i64 %n.0, %5
  %add.ptr5 = getelementptr inbounds %struct.entry, ptr %4, i64 %and
  %6 = load i64, ptr %add.ptr5, align 8
  %cmp7 = icmp eq i64 %6, %sub
  br i1 %cmp7, label %if.then8, label %do.cond
if.then8:
  %detour = getelementptr inbounds nuw i8, ptr %add.ptr5, i64 8
  %7 = load i64, ptr %detour, align 8
  store i64 %7, ptr %add.ptr, align 8
  br label %return
do.cond:
  %8 = load i64, ptr %add.ptr5, align 8
  %tobool.not = icmp eq i64 %8, 0
  br i1 %tobool.not, label %do.end, label %do.body
do.end:
  %9 = inttoptr i64 %sub to ptr
  %10 = load i8, ptr %9, align 1
  %conv = zext i8 %10 to i64
  %11 = load i64, ptr @breakpoint, align 8
  %cmp11 = icmp eq i64 %11, %conv
  br i1 %cmp11, label %return, label %if.end14
if.end14:
  store i64 %sub, ptr %add.ptr, align 8
  br label %return
return:
  %retval.0 = phi i32 [ 32769, %if.end14 ], [ 0, %entry ], [ 32769, %if.then8 ], [ 0, %if.end ], [ 0, %do.end ]
  ret i32 %retval.0
}
